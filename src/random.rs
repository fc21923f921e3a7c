//! Randomness for jitter.

use std::hash::{BuildHasher, RandomState};

/// A number that nobody can predict. The standard library seeds every `RandomState` anew, which is
/// randomness enough for jitter.
pub(crate) fn number() -> u32 {
    RandomState::new().hash_one(()) as u32
}
