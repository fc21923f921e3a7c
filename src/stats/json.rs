//! Durations and times in the JSON of statistics.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

fn read_seconds<E: Error>(seconds: f64) -> Result<Duration, E> {
    Duration::try_from_secs_f64(seconds).map_err(E::custom)
}

fn read_time<E: Error>(text: &str) -> Result<SystemTime, E> {
    let time: Timestamp = text.parse().map_err(E::custom)?;
    Ok(time.into())
}

pub(super) mod seconds {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(time: &Duration, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_f64(time.as_secs_f64())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        read_seconds(f64::deserialize(from)?)
    }
}

pub(super) mod some_seconds {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        time: &Option<Duration>,
        out: S,
    ) -> Result<S::Ok, S::Error> {
        time.map(|it| it.as_secs_f64()).serialize(out)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Duration>, D::Error> {
        let seconds: Option<f64> = Option::deserialize(from)?;
        seconds.map(read_seconds).transpose()
    }
}

pub(super) mod time {
    use super::*;
    pub(crate) use crate::postgres::time::serialize;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SystemTime, D::Error> {
        read_time(&String::deserialize(from)?)
    }
}

pub(super) mod some_time {
    use super::*;
    pub(crate) use crate::postgres::time::serialize_some as serialize;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<SystemTime>, D::Error> {
        let text: Option<String> = Option::deserialize(from)?;
        text.as_deref().map(read_time).transpose()
    }
}
