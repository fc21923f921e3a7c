//! Points in time in Postgres' format.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serializer;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo, PgValueFormat, PgValueRef};
use sqlx::{Decode, Encode, Postgres, Type};

/// A `timestamptz`: microseconds since the year 2000.
///
/// tierline needs only the standard library's time, so this avoids a calendar crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Time(pub(crate) SystemTime);

/// From 1970 to 2000.
const EPOCH: Duration = Duration::from_secs(946_684_800);
const TIMESTAMPTZ: Oid = Oid(1184);
const TIMESTAMPTZ_ARRAY: Oid = Oid(1185);
/// The limits of Postgres' calendar (4714 BC to 294276 AD), less a year.
const EARLIEST: i64 = -211_781_344_000_000_000;
const LATEST: i64 = 9_223_339_708_799_999_999;

impl Type<Postgres> for Time {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(TIMESTAMPTZ)
    }
}

impl PgHasArrayType for Time {
    fn array_type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(TIMESTAMPTZ_ARRAY)
    }
}

impl Encode<'_, Postgres> for Time {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        let microseconds = microseconds(self.0).clamp(EARLIEST, LATEST);
        <i64 as Encode<Postgres>>::encode(microseconds, buffer)
    }
}

impl Decode<'_, Postgres> for Time {
    fn decode(value: PgValueRef<'_>) -> Result<Self, BoxDynError> {
        if value.format() == PgValueFormat::Text {
            return Err("a time arrived in text format".into());
        }
        let microseconds = <i64 as Decode<Postgres>>::decode(value)?;
        let distance = Duration::from_micros(microseconds.unsigned_abs());
        let epoch = UNIX_EPOCH + EPOCH;
        let time = match microseconds < 0 {
            true => epoch.checked_sub(distance),
            false => epoch.checked_add(distance),
        };
        Ok(Self(time.ok_or(
            "a time is beyond the range of the system's clock",
        )?))
    }
}

fn microseconds(time: SystemTime) -> i64 {
    let epoch = UNIX_EPOCH + EPOCH;
    match time.duration_since(epoch) {
        Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
        Err(before) => {
            i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |before| -before)
        }
    }
}

/// Writes a time as RFC 3339, in UTC and with milliseconds.
pub(crate) fn serialize<S: Serializer>(time: &SystemTime, out: S) -> Result<S::Ok, S::Error> {
    match jiff::Timestamp::try_from(*time) {
        Ok(time) => out.serialize_str(&format!("{time:.3}")),
        Err(_) => out.serialize_none(),
    }
}

/// Writes a time that may be missing.
pub(crate) fn serialize_some<S: Serializer>(
    time: &Option<SystemTime>,
    out: S,
) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serialize(time, out),
        None => out.serialize_none(),
    }
}

impl From<SystemTime> for Time {
    fn from(time: SystemTime) -> Self {
        Self(time)
    }
}
