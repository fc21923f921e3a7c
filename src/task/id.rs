use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use uuid::{Timestamp, Uuid, Variant, Version};

/// Crockford's base32: no character is mistaken for another, and texts sort like the numbers that they stand for.
const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
/// Five bits each: the 128 of the UUID, and two before them.
const CHARACTERS: usize = 26;
/// The two bits before the UUID, in the first character, are 01: it is one of 8 to F. A ULID begins with 0 to 7.
const MARK: u8 = 0b01000;
/// The bits of the UUID in the first character.
const OF_UUID: u8 = 0b00111;
/// No character of the alphabet.
const NONE: u8 = u8::MAX;
/// The digit that each byte stands for.
const DIGITS: [u8; 256] = {
    let mut digits = [NONE; 256];
    let mut digit = 0;
    while digit < ALPHABET.len() {
        digits[ALPHABET[digit] as usize] = digit as u8;
        digit += 1;
    }
    digits
};

/// Identifies one enqueued task through all its attempts.
///
/// An id that tierline draws is a UUID v7 in 26 characters, which also says when the task was enqueued
/// ([`message::wire`](crate::message::wire#the-id)). A publisher may give any other text.
///
/// ```
/// use tierline::TaskId;
///
/// assert_ne!(TaskId::random(), TaskId::random());
/// assert_eq!(TaskId::from("order-1007").as_str(), "order-1007");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(Arc<str>);

impl TaskId {
    /// A new id of 26 characters. It sorts after those of earlier milliseconds.
    pub fn random() -> Self {
        Self::drawn_at(SystemTime::now())
    }

    /// A new id of exactly this millisecond. `Uuid::now_v7` counts on within a millisecond, and so may be ahead of the
    /// clock.
    pub(crate) fn drawn_at(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let time = Timestamp::from_unix_time(since.as_secs(), since.subsec_nanos(), 0, 0);
        Self(encode(Uuid::new_v7(time)).as_str().into())
    }

    /// The millisecond in which a text was drawn as an id, if it has exactly the form that tierline gives to an id.
    pub(crate) fn drawn_time(id: &str) -> Option<SystemTime> {
        let uuid = decode(id).filter(is_drawn)?;
        let (seconds, nanoseconds) = uuid.get_timestamp()?.to_unix();
        UNIX_EPOCH.checked_add(Duration::new(seconds, nanoseconds))
    }

    /// The id that was drawn as this UUID.
    #[cfg(feature = "postgres")]
    pub(crate) fn of_uuid(uuid: Uuid) -> Self {
        Self(encode(uuid).into())
    }

    /// The UUID that this id was drawn as, if it has exactly the form that tierline gives to an id.
    #[cfg(feature = "postgres")]
    pub(crate) fn uuid(&self) -> Option<Uuid> {
        decode(self.as_str()).filter(is_drawn)
    }

    /// The identifier as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The UUID behind a one bit, as a number in base 32.
fn encode(uuid: Uuid) -> String {
    let bits = uuid.as_u128();
    let digit = |place: usize| match (bits >> (5 * place)) as u8 & 0b11111 {
        first if place == CHARACTERS - 1 => first | MARK,
        digit => digit,
    };
    let places = (0..CHARACTERS).rev();
    places
        .map(|place| char::from(ALPHABET[usize::from(digit(place))]))
        .collect()
}

fn is_drawn(uuid: &Uuid) -> bool {
    uuid.get_version() == Some(Version::SortRand) && uuid.get_variant() == Variant::RFC4122
}

fn decode(id: &str) -> Option<Uuid> {
    let characters: &[u8; CHARACTERS] = id.as_bytes().try_into().ok()?;
    let [first, others @ ..] = characters.map(|character| DIGITS[usize::from(character)]);
    if first & !OF_UUID != MARK || others.contains(&NONE) {
        return None;
    }
    let add = |bits, digit: u8| bits << 5 | u128::from(digit);
    let bits = others.into_iter().fold((first & OF_UUID).into(), add);
    Some(Uuid::from_u128(bits))
}

impl From<&str> for TaskId {
    fn from(id: &str) -> Self {
        Self(id.into())
    }
}

impl From<String> for TaskId {
    fn from(id: String) -> Self {
        Self(id.into())
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the wire format's documentation.
    const UUID: Uuid = Uuid::from_u128(0x0199_8b1c_7d3a_7a5e_b0c4_92f1_6e08_d3b7);
    const TEXT: &str = "81K65HRZ9TF9FB1H4JY5Q0HMXQ";

    fn at(milliseconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(milliseconds)
    }

    #[test]
    fn an_id_is_the_same_in_every_release_and_language() {
        assert_eq!(encode(UUID), TEXT);
        assert_eq!(decode(TEXT), Some(UUID));
        assert_eq!(TaskId::drawn_time(TEXT), Some(at(0x0199_8b1c_7d3a)));
    }

    #[test]
    fn an_id_has_the_millisecond_that_it_was_drawn_in_however_many_are_drawn() {
        for milliseconds in [0, 1, 1_700_000_000_123, (1 << 48) - 1] {
            let time = at(milliseconds) + Duration::from_micros(999);
            for _ in 0..2_000 {
                let id = TaskId::drawn_at(time);
                assert_eq!(id.as_str().len(), CHARACTERS);
                assert_eq!(TaskId::drawn_time(id.as_str()), Some(at(milliseconds)));
            }
        }
        let before_1970 = TaskId::drawn_at(UNIX_EPOCH - Duration::from_secs(1));
        assert_eq!(TaskId::drawn_time(before_1970.as_str()), Some(UNIX_EPOCH));
    }

    #[test]
    fn ids_sort_by_their_time() {
        let drawn: Vec<_> = [5, 6, 1 << 20, 1_700_000_000_123, 1_700_000_000_124, 1 << 47]
            .map(|milliseconds| TaskId::drawn_at(at(milliseconds)))
            .into();
        assert!(drawn.is_sorted(), "{drawn:?}");
    }

    #[test]
    fn a_text_of_another_form_has_no_time() {
        let uuid_v4 = Uuid::from_u128(0x0199_8b1c_7d3a_4a5e_b0c4_92f1_6e08_d3b7);
        let other_variant = Uuid::from_u128(0x0199_8b1c_7d3a_7a5e_f0c4_92f1_6e08_d3b7);
        let ulid = TEXT.replacen('8', "0", 1);
        for other in [
            String::new(),
            UUID.to_string(),
            UUID.simple().to_string(),
            encode(uuid_v4),
            encode(other_variant),
            ulid,
            TEXT.to_lowercase(),
            TEXT.replacen('8', "G", 1),
            TEXT.replacen('8', "R", 1),
            TEXT.replace('1', "I"),
            TEXT.replace('0', "O"),
            format!("{TEXT}0"),
            TEXT[1..].to_owned(),
            // 26 bytes, of which some are no ASCII.
            "8é1K65HRZ9TF9FB1H4JY5Q0HM".to_owned(),
        ] {
            assert_eq!(TaskId::drawn_time(&other), None, "{other}");
        }
    }
}
