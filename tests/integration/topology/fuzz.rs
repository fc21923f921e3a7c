//! Whatever the file says, the answer is a topology or a list of mistakes, never a panic.

use proptest::prelude::*;
use tierline::error::TopologyError;
use tierline::{Error, Topology};

use super::plan;

const HOTEL: &str = include_str!("../../../topology/hotel.toml");

proptest! {
    #[test]
    fn random_bytes_give_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..2_000)) {
        check(&bytes);
    }

    #[test]
    fn random_text_gives_an_answer(text in any::<String>()) {
        check(text.as_bytes());
    }

    #[test]
    fn random_values_for_known_keys_give_an_answer(lines in prop::collection::vec(line(), 0..20)) {
        check(lines.join("\n").as_bytes());
    }

    #[test]
    fn a_damaged_hotel_gives_an_answer(
        cuts in prop::collection::vec((0..HOTEL.len(), 0..40usize, prop::collection::vec(any::<u8>(), 0..8)), 1..6)
    ) {
        let mut bytes = HOTEL.as_bytes().to_vec();
        for (start, length, replacement) in cuts {
            let start = start.min(bytes.len());
            let end = (start + length).min(bytes.len());
            bytes.splice(start..end, replacement);
        }
        check(&bytes);
    }

    #[test]
    fn a_hotel_with_its_lines_shuffled_gives_an_answer(
        lines in Just(HOTEL.lines().collect::<Vec<_>>()).prop_shuffle()
    ) {
        check(lines.join("\n").as_bytes());
    }
}

/// Every answer must hold together: mistakes have places in the file, and a topology can be planned.
fn check(bytes: &[u8]) {
    match Topology::parse(bytes) {
        Ok(topology) => {
            plan(&topology, "4.3.6").unwrap();
        }
        Err(Error::Topology(TopologyError::Invalid(invalid))) => {
            let lines = bytes.iter().filter(|byte| **byte == b'\n').count() + 1;
            assert!(!invalid.problems().is_empty());
            for problem in invalid.problems() {
                assert!(
                    (1..=lines).contains(&problem.line) && problem.column >= 1,
                    "{problem}"
                );
                assert!(!problem.to_string().contains('\u{1b}'), "{problem:?}");
            }
        }
        Err(other) => panic!("{other}"),
    }
}

fn line() -> impl Strategy<Value = String> {
    let key = prop::sample::select(vec![
        "app",
        "queue",
        "slo",
        "slo.start",
        "slo.objective",
        "ttl",
        "weight",
        "max_priority",
        "max_length",
        "delivery_limit",
        "generation",
        "formerly",
        "delays",
        "lease",
        "keep",
        "dlq",
        "tiers",
        "order",
        "concurrency",
        "prefetch",
        "ack_timeout",
        "max_message_size",
        "a",
        "\"a.b\"",
        "tasks.x",
        "tasks.x.tier",
        "tasks.x.priority",
        "groups.g.tiers",
        "tiers.t.queue",
        "broker",
    ]);
    let value = prop::sample::select(vec![
        "5",
        "-1",
        "0",
        "1.5",
        "nan",
        "inf",
        "true",
        "\"\"",
        "\"5s\"",
        "\"quorum\"",
        "\"classic\"",
        "\"t\"",
        "[]",
        "[\"t\"]",
        "[1]",
        "{}",
        "{ tier = \"t\" }",
        "{ queue = 1 }",
        "{ start = \"5s\", objective = 0.9 }",
        "1979-05-27",
        "9223372036854775807",
        "99999999999999999999999",
        "0xff",
        "\"\\u0000\"",
        "\"é\"",
        "'''x'''",
    ]);
    let header = prop::sample::select(vec![
        "[tiers.t]",
        "[groups.g]",
        "[tasks]",
        "[broker]",
        "[[tiers]]",
        "[tiers.t.dlq]",
    ]);
    prop_oneof![
        3 => (key, value).prop_map(|(key, value)| format!("{key} = {value}")),
        1 => header.prop_map(str::to_owned),
    ]
}
