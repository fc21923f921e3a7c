use std::time::{Duration, UNIX_EPOCH};

use super::fields::encoded_properties;
use super::*;
use crate::message::{DeadReason, Death, FailedAttempt, Failure, FailureKind};
use crate::task::PublishRequest;

const AT: i64 = 1_700_000_000_123;

#[derive(serde::Serialize, serde::Deserialize)]
struct Greet;

impl crate::Task for Greet {
    const NAME: &'static str = "greet";
}

fn message() -> Message {
    let mut request = PublishRequest::new(&Greet).unwrap();
    request
        .headers
        .insert("tenant".to_owned(), "ada".to_owned());
    request.expires = Some(Duration::from_secs(60));
    request.traceparent = Some("00-1-2-01".to_owned());
    Message::first(request, "normal", 4, time(AT))
}

fn read(properties: &BasicProperties) -> Message {
    Message::from_wire(properties, b"null".to_vec(), "normal", SystemTime::now()).unwrap()
}

fn header<'a>(properties: &'a BasicProperties, name: &str) -> Option<&'a AMQPValue> {
    properties.headers().as_ref()?.inner().get(name)
}

fn with_header(properties: BasicProperties, name: &str, value: AMQPValue) -> BasicProperties {
    let mut headers = properties.headers().clone().unwrap_or_default();
    insert(&mut headers, name, value);
    properties.with_headers(headers)
}

/// A message without options, whose id is drawn.
fn plain(task: &str) -> Message {
    let request = PublishRequest::named(task, b"null".to_vec());
    Message::first(request, "normal", 4, time(AT))
}

/// What the release before version 2 wrote for a first attempt. Never to be changed.
fn version_1(task: &str, id: &str, enqueued_at: i64) -> BasicProperties {
    let mut headers = FieldTable::default();
    for (name, value) in [
        ("tierline-version", 1),
        ("tierline-attempt", 1),
        ("tierline-enqueued-at", enqueued_at),
    ] {
        insert(&mut headers, name, AMQPValue::LongLongInt(value));
    }
    BasicProperties::default()
        .with_content_type("application/json".into())
        .with_delivery_mode(2)
        .with_priority(4)
        .with_message_id(id.into())
        .with_type(task.into())
        .with_app_id("hotel".into())
        .with_headers(headers)
}

#[test]
fn a_message_comes_out_as_it_went_in() {
    let first = message();
    for (sent, is_id_drawn) in [
        (first.clone(), true),
        (first.clone(), false),
        (first.next_attempt(), true),
        (plain("greet"), true),
    ] {
        let properties = sent.properties(is_id_drawn);
        assert_eq!(properties.delivery_mode(), &Some(PERSISTENT));
        assert!(properties.expiration().is_none());
        assert_eq!(read(&properties), sent);
    }
}

#[test]
fn a_first_attempt_has_at_most_64_bytes_of_properties() {
    let task = "guest.send_a_welcome_note";
    assert_eq!(task.len(), 25);
    let mut message = plain(task);
    let properties = message.properties(true);
    assert!(properties.headers().is_none());
    assert_eq!(encoded_properties(&properties).len(), 57);

    message.traceparent = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into());
    assert_eq!(encoded_properties(&message.properties(true)).len(), 133);

    let id = "0190163d-8694-739b-aea5-966c26f8ad91";
    let version_1 = version_1(task, id, AT);
    assert_eq!(encoded_properties(&version_1).len(), 176);
}

#[test]
fn both_versions_are_read_alike() {
    let id = "0190163d-8694-739b-aea5-966c26f8ad91";
    let first = read(&version_1("greet", id, AT));
    let mut now = plain("greet");
    now.id = id.into();
    assert_eq!(first, now);
    assert_eq!(read(&now.properties(false)), now);
    // Whoever writes the version of today into a message means the same.
    let said = with_header(now.properties(false), "tierline-version", 2.into());
    assert_eq!(read(&said), now);
}

#[test]
fn a_version_that_is_not_known_is_not_misread_and_stays_with_the_dead_letter() {
    for unknown in [i64::MIN, 0, 3, i64::MAX] {
        let version = AMQPValue::LongLongInt(unknown);
        let delivered = with_header(plain("greet").properties(true), "tierline-version", version);
        let result = Message::from_wire(&delivered, Vec::new(), "normal", UNIX_EPOCH);
        let error = result.unwrap_err();
        assert!(error.contains(&format!("version {unknown} ")), "{error}");
        let dead = death().properties(&delivered, None, None);
        assert_eq!(integer(header(&dead, "tierline-version")), Some(unknown));
    }
}

#[test]
fn no_version_is_written_whatever_a_message_came_with() {
    let id = TaskId::random();
    for delivered in [
        plain("greet").properties(true),
        version_1("greet", id.as_str(), AT),
        with_header(
            plain("greet").properties(true),
            "tierline-version",
            2.into(),
        ),
    ] {
        let message = read(&delivered);
        let next = message.follow(&delivered, None);
        let dead = death().properties(&delivered, Some(&message), None);
        for sent in [next, dead] {
            assert!(header(&sent, "tierline-version").is_none());
            assert!(header(&sent, "tierline-attempt").is_none());
            assert_eq!(read(&sent).enqueued_at, time(AT));
        }
    }
}

#[test]
fn a_publish_states_the_time_unless_it_drew_the_id_in_that_millisecond() {
    let drawn = plain("greet");
    assert!(header(&drawn.properties(true), ENQUEUED_AT).is_none());
    // A caller's id may be one that was drawn for another task, even in the same millisecond.
    assert!(header(&drawn.properties(false), ENQUEUED_AT).is_some());
    let later = Message {
        enqueued_at: time(AT + 1),
        ..drawn
    };
    assert!(header(&later.properties(true), ENQUEUED_AT).is_some());
    assert_eq!(read(&later.properties(true)).enqueued_at, time(AT + 1));
}

#[test]
fn whatever_follows_keeps_the_time_and_states_it_for_programs_of_version_1() {
    let sent = plain("greet");
    let delivered = sent.properties(true);
    let message = read(&delivered);
    let retried = message.clone().next_attempt().follow(&delivered, None);
    let copied = message.follow(&delivered, None);
    let dead = death().properties(&delivered, Some(&message), None);
    let redriven = read(&dead).follow(&dead, None);
    let again = read(&retried).next_attempt().follow(&retried, None);
    for next in [&retried, &copied, &dead, &redriven, &again] {
        assert_eq!(integer(header(next, ENQUEUED_AT)), Some(AT));
        assert_eq!(
            (read(next).enqueued_at, &read(next).id),
            (time(AT), &sent.id)
        );
    }
    assert_eq!((read(&retried).attempt, read(&again).attempt), (2, 3));
}

#[test]
fn the_time_in_an_id_counts_only_where_nothing_else_is_said() {
    let now = SystemTime::now();
    let arrived = |properties: &BasicProperties| {
        let message = Message::from_wire(properties, Vec::new(), "normal", now).unwrap();
        message.enqueued_at == now
    };
    let drawn = plain("greet").properties(true);
    assert!(!arrived(&drawn));
    assert!(arrived(&with_header(
        drawn.clone(),
        "tierline-version",
        1.into()
    )));
    assert!(arrived(&with_header(
        drawn.clone(),
        ENQUEUED_AT,
        long("yesterday")
    )));
    let stated = with_header(drawn, ENQUEUED_AT, 5.into());
    assert_eq!(read(&stated).enqueued_at, time(5));
    let ulid = "01J0YYVFJJW6K5XTKMK5TWRQG9";
    let caller = BasicProperties::default().with_type("greet".into());
    for id in [ulid, "0190163d-8694-739b-aea5-966c26f8ad91", "7", ""] {
        assert!(arrived(&caller.clone().with_message_id(id.into())), "{id}");
    }
}

#[test]
fn an_id_of_an_absurd_time_does_no_harm() {
    let arrival = time(AT);
    let enqueued_at = |drawn_at| {
        let mut request = PublishRequest::named("greet", Vec::new());
        request.id = Some(TaskId::drawn_at(drawn_at));
        let message = Message::first(request, "normal", 4, drawn_at);
        let properties = message.properties(true);
        let read = Message::from_wire(&properties, Vec::new(), "normal", arrival).unwrap();
        let next = read.follow(&properties, None);
        assert_eq!(
            integer(header(&next, ENQUEUED_AT)),
            Some(milliseconds(read.enqueued_at))
        );
        read.enqueued_at
    };
    let a_day = Duration::from_secs(24 * 60 * 60);
    let year_10889 = time((1 << 48) - 1);
    assert_eq!(enqueued_at(year_10889), arrival);
    assert_eq!(
        enqueued_at(arrival + a_day + Duration::from_millis(1)),
        arrival
    );
    // A clock that is ahead is a clock all the same: each delivery of a message has the same time.
    assert_eq!(enqueued_at(arrival + a_day), arrival + a_day);
    assert_eq!(enqueued_at(UNIX_EPOCH), UNIX_EPOCH);
    // A clock beyond what an id can hold.
    let beyond = time(1 << 48);
    assert_eq!(enqueued_at(beyond), beyond);
}

fn death() -> Death {
    Death {
        reason: DeadReason::Permanent,
        failure: Failure::new(FailureKind::Error, "no"),
        at: UNIX_EPOCH,
        worker: String::new(),
        version: String::new(),
    }
}

#[test]
fn a_foreign_message_needs_a_type_and_a_body_alone() {
    let now = time(5_000);
    let properties = BasicProperties::default().with_type("greet".into());
    let read = Message::from_wire(&properties, b"null".to_vec(), "normal", now).unwrap();
    assert_eq!(
        (read.task.as_str(), read.attempt, read.enqueued_at),
        ("greet", 1, now)
    );
    assert!(!read.id.as_str().is_empty() && read.expires_at.is_none());

    let nameless = BasicProperties::default();
    let error = Message::from_wire(&nameless, Vec::new(), "normal", now).unwrap_err();
    assert!(error.contains("\"type\""), "{error}");
}

#[test]
fn numbers_of_every_width_are_read_and_odd_ones_do_no_harm() {
    let read = |value: AMQPValue| {
        let mut headers = FieldTable::default();
        insert(&mut headers, "tierline-attempt", value.clone());
        insert(&mut headers, "tierline-expires-at", value);
        let properties = BasicProperties::default()
            .with_type("greet".into())
            .with_headers(headers);
        Message::from_wire(&properties, Vec::new(), "normal", UNIX_EPOCH).unwrap()
    };
    for value in [
        AMQPValue::ShortShortUInt(3),
        AMQPValue::ShortInt(3),
        AMQPValue::LongUInt(3),
        AMQPValue::LongLongInt(3),
    ] {
        assert_eq!(read(value).attempt, 3);
    }
    assert_eq!(read(AMQPValue::LongLongInt(i64::MIN)).attempt, 1);
    assert_eq!(read(AMQPValue::LongLongInt(i64::MAX)).attempt, u32::MAX);
    assert_eq!(read(AMQPValue::LongString("3".into())).attempt, 1);
}

#[test]
fn an_attempt_that_follows_carries_its_history_and_no_death_headers() {
    let mut sent = message().next_attempt();
    sent.life = 2;
    sent.crashes = 1;
    sent.redriven = Some(Redriven {
        from: "7".to_owned(),
        by: "ada".to_owned(),
    });
    let mut headers = FieldTable::default();
    insert(
        &mut headers,
        "x-death",
        AMQPValue::FieldArray(Default::default()),
    );
    insert(&mut headers, "tierline-reason", long("permanent error"));
    insert(&mut headers, "tenant", long("ada"));
    insert(&mut headers, "traceparent", long("00-1-2-01"));
    let delivered = BasicProperties::default()
        .with_type("greet".into())
        .with_headers(headers);
    sent.history = (1..100)
        .map(|attempt| FailedAttempt {
            attempt,
            at: time(attempt.into()),
            kind: FailureKind::TimedOut,
            error: "e".repeat(200),
        })
        .collect();
    let properties = sent.follow(&delivered, None);
    let headers = properties.headers().as_ref().unwrap().inner();
    assert!(!headers.contains_key("x-death") && !headers.contains_key("tierline-reason"));
    let read = Message::from_wire(&properties, sent.payload.clone(), "normal", UNIX_EPOCH);
    let read = read.unwrap();
    assert!(read.history.len() > 10 && sent.history.ends_with(&read.history));
    assert_eq!(
        Message {
            history: sent.history.clone(),
            ..read
        },
        sent
    );
}
