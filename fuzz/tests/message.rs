//! Messages that no program of ours has written.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::panic::AssertUnwindSafe;
use std::time::{Duration, SystemTime};

use lapin::options::BasicPublishOptions;
use lapin::{Connection, ConnectionProperties};
use serde::{Deserialize, Serialize};
use tierline::execute::Verdict;
use tierline::message::{Death, Message};
use tierline::testing::Tester;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_fuzz::{Header, MAP, drawn_id, properties};
use tierline_testbed::{database, vhost};

#[derive(Serialize, Deserialize)]
struct Note {
    number: u64,
    words: Vec<Option<String>>,
}

impl Task for Note {
    const NAME: &'static str = "note";
}

#[test]
fn any_headers_are_read_or_refused_with_a_reason() {
    bolero::check!()
        .with_type::<Vec<Header>>()
        .for_each(|headers| {
            let properties = properties("note", "1", headers);
            let now = SystemTime::now();
            match Message::from_wire(&properties, b"{}".to_vec(), "normal", now) {
                Ok(message) => assert!(message.attempt >= 1 && message.id.as_str() == "1"),
                Err(problem) => assert!(!problem.is_empty()),
            }
            Death::from_wire(&properties);
        });
}

#[test]
fn an_id_of_any_time_is_read_and_no_time_is_far_ahead() {
    bolero::check!()
        .with_type::<(u64, u64, u8)>()
        .for_each(|(high, low, seconds)| {
            let bits = u128::from(*high) << 64 | u128::from(*low);
            let id = drawn_id(bits);
            let drawn_at = SystemTime::UNIX_EPOCH + Duration::from_millis(high >> 16);
            let day = Duration::from_secs(24 * 60 * 60);
            // Now, about when it was drawn, and long before.
            let now = SystemTime::now();
            let about = drawn_at - day + Duration::from_secs(u64::from(*seconds));
            for arrived_at in [now, about, SystemTime::UNIX_EPOCH] {
                let mut properties = properties("note", &id, &[]);
                let read = Message::from_wire(&properties, Vec::new(), "normal", arrived_at);
                let message = read.unwrap();
                let expected = match drawn_at <= arrived_at + day {
                    true => drawn_at,
                    false => arrived_at,
                };
                assert_eq!((message.id.as_str(), message.enqueued_at), (&*id, expected));
                // Nothing but the very form counts.
                properties = properties.with_message_id(id.to_lowercase().into());
                let read = Message::from_wire(&properties, Vec::new(), "normal", arrived_at);
                assert_eq!(read.unwrap().enqueued_at, arrived_at);
            }
        });
}

#[test]
fn any_payload_is_run_or_parked() {
    let mut registry = Registry::new();
    registry
        .register::<Note, _>(|note: Note| async move { drop(note.words) })
        .unwrap();
    let tester = Tester::builder().registry(registry).build();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let run =
        AssertUnwindSafe(|message: Message| runtime.block_on(tester.run_message(message)).verdict);
    bolero::check!().for_each(|payload: &[u8]| {
        let run = &run;
        let properties = properties("note", "1", &[]);
        let now = SystemTime::now();
        let message = Message::from_wire(&properties, payload.to_vec(), "normal", now);
        let verdict = run(message.unwrap());
        let is_note = serde_json::from_slice::<Note>(payload).is_ok();
        assert_eq!(verdict == Verdict::Done, is_note, "{verdict:?}");
    });
}

/// The same numbers in every run.
struct Random(u64);

impl Random {
    fn bytes(&mut self, most: u64) -> Vec<u8> {
        let count = self.next() % (most + 1);
        (0..count).map(|_| self.next() as u8).collect()
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 8
    }
}

#[tokio::test]
async fn whatever_is_in_a_dead_letter_queue_is_logged() {
    let (vhost, database) = tokio::join!(vhost(), database());
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .connect()
        .await
        .unwrap();
    app.database().unwrap().migrate().await.unwrap();
    let connection = Connection::connect(vhost.amqp_url(), ConnectionProperties::default()).await;
    let channel = connection.unwrap().create_channel().await.unwrap();
    let mut random = Random(0x5eed);
    for number in 0..300 {
        let headers: Vec<Header> = (0..random.next() % 12)
            .map(|_| (random.next() as u8, random.next() as u8, random.bytes(24)))
            .collect();
        let id = match number % 2 {
            0 => format!("id-{number}"),
            _ => drawn_id(u128::from(random.next()) << 72 | u128::from(random.next())),
        };
        let properties = properties("note", &id, &headers);
        let payload = random.bytes(64);
        let options = BasicPublishOptions::default();
        let sent = channel.basic_publish(
            "".into(),
            "shop.normal.dlq".into(),
            options,
            &payload,
            properties,
        );
        sent.await.unwrap();
    }
    let letters = app.dead_letters().unwrap();
    let collector = app.collector().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let collecting = tokio::spawn(collector.until(async move { drop(stopped.await) }));
    let all = async {
        loop {
            let tiers = letters.by_tier().await.unwrap();
            if tiers.iter().map(|tier| tier.dead).sum::<u64>() == 300 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let all = tokio::time::timeout(Duration::from_secs(60), all).await;
    assert!(all.is_ok(), "{:?}", letters.by_tier().await);
    drop(stop);
    collecting.await.unwrap().unwrap();
}
