//! The publish request of a run.

use std::time::Duration;

use jiff::Timestamp;

use super::due::remaining;
use crate::TaskId;
use crate::task::PublishRequest;
use crate::topology::Schedule;

/// The header of every run with the name of its schedule.
pub const SCHEDULE_HEADER: &str = "schedule";
/// The header of every run with its due time, such as `2026-11-16T02:00:00Z`.
pub const DUE_AT_HEADER: &str = "schedule-due-at";

/// How long one attempt to publish a run may take. After it the leader looks at the schedule again: by then
/// a newer run may be due.
const DEADLINE: Duration = Duration::from_secs(5);

/// The id of a run: the same whichever process publishes it.
pub(super) fn id(schedule: &str, due: Timestamp) -> TaskId {
    TaskId::from(format!("schedule:{schedule}:{due}"))
}

/// The request for the run that is due at `due`.
pub(super) fn request(schedule: &Schedule, due: Timestamp, now: Timestamp) -> PublishRequest {
    let payload = schedule.payload.to_string().into_bytes();
    let mut request = PublishRequest::named(&schedule.task, payload);
    let remaining = remaining(schedule, due, now);
    request.id = Some(id(&schedule.name, due));
    request.expires = Some(remaining);
    request.deadline = Some(remaining.min(DEADLINE));
    let headers = [
        (SCHEDULE_HEADER, schedule.name.clone()),
        (DUE_AT_HEADER, due.to_string()),
    ];
    let headers = headers.map(|(name, value)| (name.to_owned(), value));
    request.headers.extend(headers);
    request
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::topology::Timing;

    #[test]
    fn a_run_carries_its_due_time_and_what_is_left_until_it_expires() {
        let timing = Timing::cron("0 * * * *", "UTC").unwrap();
        let expires = Duration::from_secs(600);
        let schedule = Schedule::of("hourly", "t", json!({"a": 1}), timing, expires);
        let due: Timestamp = "2026-11-16T12:00Z".parse().unwrap();
        let run = request(&schedule, due, due + Duration::from_secs(60));
        let id = run.id.as_ref().map(TaskId::as_str);
        assert_eq!(id, Some("schedule:hourly:2026-11-16T12:00:00Z"));
        assert_eq!(run.expires, Some(Duration::from_secs(540)));
        assert_eq!(run.headers[DUE_AT_HEADER], "2026-11-16T12:00:00Z");
        assert_eq!(run.headers[SCHEDULE_HEADER], "hourly");
        assert_eq!(run.payload, br#"{"a":1}"#);

        let late = request(&schedule, due, due + Duration::from_secs(599));
        assert_eq!(late.deadline, Some(Duration::from_secs(1)));
    }
}
