//! Names of tasks: validation, and the compile error for a second use within a crate.

use proc_macro2::TokenStream;
use quote::quote_spanned;
use syn::{Ident, LitStr};

/// AMQP carries the name in a string of at most this many bytes.
const LONGEST: usize = 255;

pub(crate) fn check(name: &LitStr) -> syn::Result<()> {
    let value = name.value();
    let problem = if value.is_empty() {
        "a task's name cannot be empty: write the name that the map has, such as \"email.send_otp\""
    } else if value.chars().any(char::is_control) {
        "a task's name cannot contain control characters"
    } else if value.len() > LONGEST {
        "a task's name cannot be longer than 255 bytes, since AMQP carries no more"
    } else {
        return Ok(());
    };
    Err(syn::Error::new(name.span(), problem))
}

/// An item that can exist only once per crate and name, in any module.
///
/// An exported macro belongs to the root of its crate, whatever module it is in, so two of one name
/// collide. The compiler points at both names and shows the item's name, which tells what to do.
pub(crate) fn uniqueness_guard(name: &LitStr) -> TokenStream {
    let guard = Ident::new(
        &format!("rename_one_of_the_tasks_named_{}", encode(&name.value())),
        name.span(),
    );
    quote_spanned! {name.span()=>
        #[doc(hidden)]
        #[allow(non_local_definitions)]
        #[macro_export]
        macro_rules! #guard { () => {}; }
    }
}

/// The name as part of an identifier, different for different names.
///
/// In a usual name, of words joined by single dots and underscores, a dot becomes two underscores.
/// Any other name also gets its hash, after three underscores, which no usual name can contain.
fn encode(name: &str) -> String {
    let readable: String = name
        .chars()
        .map(|character| {
            if character.is_ascii_alphanumeric() {
                character
            } else {
                '_'
            }
        })
        .collect();
    let is_usual = name.split(['.', '_']).all(|word| {
        !word.is_empty()
            && word
                .chars()
                .all(|character| character.is_ascii_alphanumeric())
    });
    if is_usual {
        name.replace('.', "__")
    } else {
        format!("{readable}___{:x}", fnv_1a(name))
    }
}

fn fnv_1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::encode;

    #[test]
    fn usual_names_stay_readable() {
        assert_eq!(encode("email.send_otp"), "email__send_otp");
    }

    #[test]
    fn different_names_stay_different() {
        let names = [
            "a.b", "a_b", "a__b", "a..b", "a-b", "a:b", "ab", "a.b.", ".a.b", "_a.b", "à.b", "A.b",
        ];
        let encoded: BTreeSet<String> = names.iter().map(|name| encode(name)).collect();
        assert_eq!(encoded.len(), names.len());
    }
}
