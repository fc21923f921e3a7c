//! Every mistake is found, at its place, with what to do about it.

use tierline::error::TopologyError;
use tierline::{Error, Topology};

use super::{problems, small, the_problem};

#[test]
fn seven_mistakes_give_seven_messages_with_their_lines() {
    let text = r#"app = "hotel"

[tiers.critical]
queue = "clasic"
slo = "5 parsecs"
wieght = 10

[tiers.bulk]
queue = "quorum"

[groups.urgent]
tiers = ["critical"]
concurrency = 0

[tasks]
"email.send_otp" = "critcal"
"contacts.import" = { tier = "bulk", priority = 3 }
"#;
    let found = problems(Topology::parse_named("hotel.toml", text));
    let places: Vec<_> = found
        .iter()
        .map(|problem| (problem.line, problem.column))
        .collect();
    assert_eq!(
        places,
        [(4, 9), (5, 7), (6, 1), (8, 8), (13, 15), (16, 20), (17, 49)],
        "{found:#?}"
    );
}

#[test]
fn every_kind_of_mistake_is_explained() {
    let text = include_str!("mistakes.toml");
    insta::assert_snapshot!(Topology::parse_named("mistakes.toml", text).unwrap_err());
}

#[test]
fn a_misspelt_tier_of_a_task_is_a_near_miss() {
    assert_eq!(
        the_problem(small(
            |text| text.replace("\"mail.send\" = \"main\"", "\"mail.send\" = \"mian\"")
        )),
        "<text>:8:15: the task \"mail.send\" names the unknown tier \"mian\"\n    help: did you mean \"main\"?"
    );
}

#[test]
fn a_misspelt_tier_of_a_group_is_one_mistake_not_two() {
    let problem = the_problem(small(|text| text.replace("[\"main\"]", "[\"mian\"]")));
    assert!(
        problem.contains("[groups.all] names the unknown tier \"mian\""),
        "{problem}"
    );
}

#[test]
fn a_tier_in_no_group_is_refused() {
    let problem = the_problem(small(|text| text + "[tiers.lonely]\nqueue = \"quorum\"\n"));
    assert!(
        problem.starts_with("<text>:9:8: the tier \"lonely\" is in no group"),
        "{problem}"
    );
}

#[test]
fn a_tier_in_two_groups_is_refused() {
    let second = "[groups.second]\ntiers = [\"main\"]\nconcurrency = 1\n";
    let problem = the_problem(small(|text| text + second));
    assert!(
        problem.starts_with(
            "<text>:10:10: the tier \"main\" is in two groups: \"all\" and \"second\""
        )
    );
    assert!(problem.contains("line 5"), "{problem}");
}

#[test]
fn a_weighted_group_needs_weights() {
    let weighted =
        |text: String| text.replace("concurrency = 4", "concurrency = 4\norder = \"weighted\"");
    let problem = the_problem(small(weighted));
    assert!(
        problem.contains("is weighted, and its tier \"main\" has no weight"),
        "{problem}"
    );
    small(|text| weighted(text).replace("\"classic\"", "\"classic\"\nweight = 0.5")).unwrap();
}

#[test]
fn a_weight_must_be_positive_and_finite() {
    for weight in [
        "0", "-1", "0.0", "-0.5", "nan", "inf", "-inf", "1e300", "\"1\"", "true",
    ] {
        let problem = the_problem(small(|text| {
            text.replace("\"classic\"", &format!("\"classic\"\nweight = {weight}"))
        }));
        assert!(
            problem.contains("weight in [tiers.main] must be a number from 0.001 to 1000"),
            "{problem}"
        );
    }
}

#[test]
fn an_objective_is_a_share_below_one() {
    let with =
        |slo: &str| small(|text| text.replace("\"classic\"", &format!("\"classic\"\nslo = {slo}")));
    let objective = |slo| with(slo).unwrap().tier("main").unwrap().objective();
    assert_eq!(objective("\"5s\""), Some(0.99));
    assert_eq!(objective("{ start = \"5s\" }"), Some(0.99));
    assert_eq!(
        objective("{ start = \"5s\", objective = 0.9999 }"),
        Some(0.9999)
    );
    let without = small(|text| text).unwrap();
    assert_eq!(without.tier("main").unwrap().objective(), None);

    assert_eq!(
        the_problem(with("{ start = \"5s\", objective = 99.9 }")),
        "<text>:4:35: objective in [tiers.main.slo] must be a share of the tasks below 1, found 99.9\n    \
         help: write 0.999 for 99.9 %"
    );
    assert_eq!(
        the_problem(with("{ start = \"5s\", objectve = 0.9 }")),
        "<text>:4:23: unknown key \"objectve\" in [tiers.main.slo]\n    help: did you mean \"objective\"?"
    );
    assert_eq!(
        the_problem(with("{ objective = 0.9 }")),
        "<text>:4:1: start is missing in [tiers.main.slo]\n    \
         help: write start = \"5s\", say: how soon a task should start"
    );
    for objective in ["1", "0.49", "0", "-1", "100", "nan", "\"0.9\"", "true"] {
        let problem = the_problem(with(&format!(
            "{{ start = \"5s\", objective = {objective} }}"
        )));
        let expected = "objective in [tiers.main.slo] must be a number from 0.5 to 0.99999, found ";
        assert!(problem.contains(expected), "{problem}");
    }
    assert!(the_problem(with("5")).contains("slo in [tiers.main] must be a duration, found 5"));
}

#[test]
fn a_key_given_twice_is_reported_beside_the_other_mistakes() {
    let found = problems(small(|text| {
        text + "\"mail.send\" = \"main\"\n\"sms.send\" = \"nowhere\"\n"
    }));
    let messages: Vec<_> = found
        .iter()
        .map(|problem| (problem.line, problem.message.as_str()))
        .collect();
    assert_eq!(
        messages,
        [
            (9, "the key \"mail.send\" is given twice"),
            (
                10,
                "the task \"sms.send\" names the unknown tier \"nowhere\""
            )
        ]
    );
}

#[test]
fn a_task_name_without_its_quotes_is_recognised() {
    let problem = the_problem(small(|text| text.replace("\"mail.send\"", "mail.send")));
    assert!(
        problem.starts_with("<text>:8:6: the name of the task \"mail.send\" needs quotes"),
        "{problem}"
    );
}

#[test]
fn broken_toml_is_reported_alone_and_at_its_place() {
    let problem = the_problem(small(|text| {
        text.replace("\"classic\"", "\"classic").replace("4", "0")
    }));
    assert!(
        problem.starts_with("<text>:3:17: not valid TOML: "),
        "{problem}"
    );
}

#[test]
fn a_misspelt_section_is_not_also_missing() {
    let problem = the_problem(small(|text| text.replace("[tasks]", "[taks]")));
    assert!(problem.ends_with("did you mean \"tasks\"?"), "{problem}");
}

#[test]
fn an_empty_file_is_one_mistake() {
    for text in ["", "\n\n", "# nothing yet\n", "\u{feff}"] {
        assert!(
            the_problem(Topology::parse(text)).contains("the topology is empty"),
            "{text:?}"
        );
    }
}

#[test]
fn what_is_not_text_is_refused_where_it_begins() {
    let problem = the_problem(Topology::parse(b"app = \"x\"\n\xff\xfe"));
    assert!(
        problem.starts_with("<text>:2:1: from here on the file is not UTF-8"),
        "{problem}"
    );
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = Topology::load("topology/no-such-hotel.toml").unwrap_err();
    assert!(matches!(
        error,
        Error::Topology(TopologyError::Unreadable { .. })
    ));
    assert!(
        error.to_string().contains("topology/no-such-hotel.toml"),
        "{error}"
    );
    assert!(!error.is_transient());
}

#[test]
fn the_message_counts_the_mistakes_at_its_end() {
    assert!(
        Topology::parse("")
            .unwrap_err()
            .to_string()
            .ends_with("\n1 problem in the topology")
    );
    assert!(
        Topology::parse("a = 1")
            .unwrap_err()
            .to_string()
            .ends_with("\n5 problems in the topology")
    );
}
