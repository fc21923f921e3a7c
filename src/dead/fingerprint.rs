//! Groups equal failures: a fingerprint of the task, the type of its error, and the message without its
//! variable parts.

use sha2::{Digest, Sha256};

/// How many bytes of a message count; the rest is detail.
const LONGEST: usize = 2_000;

/// The same text for failures that have the same cause, as far as their texts show.
///
/// Sixteen hexadecimal digits. Every release computes the same, so that groups outlive an upgrade.
pub(super) fn fingerprint(task: &str, error_type: Option<&str>, message: &str) -> String {
    let mut hash = Sha256::new();
    for part in [task, error_type.unwrap_or_default(), &template(message)] {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    hex(&hash.finalize()[..8])
}

/// A message without its variable parts: ids, numbers, addresses, times and quoted values.
fn template(message: &str) -> String {
    let message = &message[..message.floor_char_boundary(LONGEST)];
    let mut out = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(first) = rest.chars().next() {
        if first.is_whitespace() {
            rest = rest.trim_start();
            out.push(' ');
        } else if let Some(end) = quoted(rest, &out) {
            out.push(first);
            out.push('#');
            out.push(first_of(&rest[end..]).unwrap_or(first));
            rest = &rest[end + first_of(&rest[end..]).map_or(0, char::len_utf8)..];
        } else if is_of_word(first) {
            let end = rest.find(|c| !is_of_word(c)).unwrap_or(rest.len());
            // A full stop or a colon at the end belongs to the sentence.
            let word = rest[..end].trim_end_matches(['.', ':', ',', '-', '/', '@']);
            let word = if word.is_empty() { &rest[..end] } else { word };
            match is_variable(word) {
                true => out.push('#'),
                false => out.push_str(word),
            }
            rest = &rest[word.len()..];
        } else {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    out.truncate(out.trim_end().len());
    out
}

fn first_of(text: &str) -> Option<char> {
    text.chars().next()
}

/// The end of the quoted value at the beginning. An apostrophe inside a word does not begin one.
fn quoted(text: &str, before: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let closing = match quote {
        '"' | '\'' | '`' => quote,
        '“' => '”',
        '«' => '»',
        _ => return None,
    };
    if before.ends_with(char::is_alphanumeric) {
        return None;
    }
    let begin = quote.len_utf8();
    let end = begin + text[begin..].find(closing)?;
    // A quoted value is not empty and has no line break.
    (end > begin && !text[begin..end].contains('\n')).then_some(end)
}

/// Letters, digits and the characters that join ids, addresses and times.
fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '.' | ':' | '-' | '_' | '@' | '/' | '+' | '%' | '~')
}

/// Whether a word is a variable value: it has a digit or an @, or is a URL or a path.
fn is_variable(word: &str) -> bool {
    // A Rust path such as std::io::Error is a name.
    if word.contains("::") && !word.chars().any(|c| c.is_ascii_digit()) {
        return false;
    }
    word.chars().any(|c| c.is_numeric())
        || word.contains('@')
        || word.contains("://")
        || word.starts_with('/') && word.len() > 1
        || is_long_hex(word)
}

/// Ids of letters alone, such as `deadbeef`, are at least this long.
fn is_long_hex(word: &str) -> bool {
    word.len() >= 16 && word.chars().all(|c| c.is_ascii_hexdigit())
}

pub(super) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_varies_is_taken_out_and_what_tells_stays() {
        for (message, expected) in [
            ("", ""),
            ("connection refused", "connection refused"),
            (
                "order 5f0c8a52-1f0e-7d2b-9a4e-2b7d8c6f1a00 not found",
                "order # not found",
            ),
            ("timeout after 30s", "timeout after #"),
            ("HTTP 503 Service Unavailable", "HTTP # Service Unavailable"),
            (
                "GET https://api.example.com/v1/users/7?x=1 failed: 429",
                "GET #?x=# failed: #",
            ),
            ("key \"abc\" is taken", "key \"#\" is taken"),
            ("can't open 'a b c': denied", "can't open '#': denied"),
            ("at 2024-05-01T10:00:00Z on db-7.internal:5432", "at # on #"),
            ("std::io::Error in core::num", "std::io::Error in core::num"),
            ("no such file: /tmp/a/b.txt.", "no such file: #."),
            ("mail to ada@example.org bounced", "mail to # bounced"),
            ("a  \n b", "a b"),
            ("unclosed 'quote", "unclosed 'quote"),
            ("日本 12 語", "日本 # 語"),
        ] {
            assert_eq!(template(message), expected);
        }
    }

    #[test]
    fn the_same_failure_of_two_orders_has_one_fingerprint() {
        let of = |order: u32| fingerprint("order.pay", None, &format!("order {order} not found"));
        assert_eq!(of(1), of(22));
        assert_ne!(of(1), fingerprint("order.ship", None, "order 1 not found"));
        assert_ne!(
            of(1),
            fingerprint("order.pay", Some("Lost"), "order 1 not found")
        );
    }

    #[test]
    fn a_fingerprint_is_the_same_in_every_release() {
        let stored = fingerprint("order.pay", Some("NotFound"), "order 7 not found");
        assert_eq!(stored, "696d4bea8bd92d42");
    }

    proptest::proptest! {
        #[test]
        fn any_text_has_a_template(message in "\\PC*") {
            template(&message);
        }

        #[test]
        fn any_mixture_of_quotes_and_numbers_has_a_template(message in "[ '\"`“”0-9a-c.:@/\\n-]*") {
            template(&message);
        }
    }
}
