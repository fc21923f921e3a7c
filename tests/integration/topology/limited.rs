//! Limits of tiers and tasks, and fair tiers, in the file.

use std::time::Duration;

use tierline::error::TopologyError;
use tierline::topology::{LimitScope, Rate};
use tierline::{Error, Tierline, Topology};

use super::{small, the_problem};

/// The small file with these keys in its tier, and with this line for its task.
fn file(tier: &str, task: &str) -> Result<Topology, Error> {
    small(|text| {
        let text = text.replace(
            "queue = \"classic\"",
            &format!("queue = \"classic\"\n{tier}"),
        );
        text.replace(
            "\"mail.send\" = \"main\"",
            &format!("\"mail.send\" = {task}"),
        )
    })
}

fn tier(limit: &str) -> Result<Topology, Error> {
    file(&format!("limit = {limit}"), "\"main\"")
}

fn task(limit: &str) -> Result<Topology, Error> {
    file("", &format!("{{ tier = \"main\", limit = {limit} }}"))
}

#[test]
fn a_tier_and_a_task_have_the_limits_that_the_file_gives_them() {
    let text = r#"
        app = "shop"
        [tiers.mail]
        queue = "quorum"
        limit = { rate = "100/m" }
        [tiers.exports]
        queue = "postgres"
        limit = { running = 4, scope = "process" }
        fair = "order.customer"
        [tiers.free]
        queue = "classic"
        [groups.all]
        tiers = ["mail", "exports", "free"]
        concurrency = 4
        [tasks]
        "mail.send" = "mail"
        "report.export" = { tier = "exports", limit = { rate = "5/10s", burst = 20, running = 2, per = "order.customer" } }
    "#;
    let topology = Topology::parse(text).unwrap();
    let limit_of = |tier: &str| topology.tier(tier).unwrap().limit.clone();
    let mail = limit_of("mail").unwrap();
    let rate: Rate = "100/m".parse().unwrap();
    assert_eq!(
        (mail.rate, mail.running, mail.scope),
        (Some(rate), None, LimitScope::App)
    );
    let exports = limit_of("exports").unwrap();
    assert_eq!((exports.rate, exports.running), (None, Some(4)));
    assert_eq!(exports.scope, LimitScope::Process);
    assert_eq!(limit_of("free"), None);
    let fair = &topology.tier("exports").unwrap().fair;
    assert_eq!(fair.as_deref(), Some("order.customer"));
    let export = topology.task("report.export").unwrap().limit.clone();
    let export = export.unwrap();
    assert_eq!(export.rate.map(|rate| rate.burst()), Some(20));
    assert_eq!(export.per.as_deref(), Some("order.customer"));
    assert_eq!(topology.task("mail.send").unwrap().limit, None);
}

#[test]
fn every_mistake_of_a_limit_says_what_to_write() {
    for (made, expected) in [
        (
            tier("{}"),
            "limit in [tiers.main] limits nothing\n    help: write rate = \"100/m\", running = 4 or both",
        ),
        (tier("5"), "limit in [tiers.main] must be a table"),
        (
            tier("{ rate = 5 }"),
            "rate in [tiers.main.limit] must be a string",
        ),
        (
            tier("{ rate = \"fast\" }"),
            "rate in [tiers.main.limit] cannot be \"fast\"\n    help: write a number and a time",
        ),
        (tier("{ rate = \"0/s\" }"), "pause what must not run"),
        (tier("{ burst = 5 }"), "has no rate"),
        (tier("{ running = 4, burst = 5 }"), "has no rate"),
        (
            tier("{ rate = \"1/s\", burst = 0 }"),
            "a whole number from 1 to 1000000",
        ),
        (tier("{ running = 0 }"), "a whole number from 1 to 1000000"),
        (
            tier("{ running = 1, scope = \"proces\" }"),
            "did you mean \"process\"?",
        ),
        (
            tier("{ running = 1, runing = 2 }"),
            "unknown key \"runing\"",
        ),
        (tier("{ running = 1, per = \"customer\" }"), "is for tasks"),
        (
            task("{ rate = \"1/s\", per = \"customer\" }"),
            "has no running\n    help: write running = 1",
        ),
        (
            task("{ running = 1, per = \"a..b\" }"),
            "name a field of the payload",
        ),
        (
            task("{ running = 1, per = \"customer\", scope = \"process\" }"),
            "has per and scope = \"process\"",
        ),
        (
            file("fair = \"customer\"", "\"main\""),
            "is for tiers in Postgres",
        ),
        (
            small(|text| {
                let fair = "\"postgres\"\nfair = \"customer\"\npromote = { after = \"1h\", to = \"up\" }\n\
                            [tiers.up]\nqueue = \"postgres\"";
                let text = text.replace("\"classic\"", fair);
                text.replace("[\"main\"]", "[\"up\", \"main\"]")
            }),
            "has fair and promote",
        ),
    ] {
        let problem = the_problem(made);
        assert!(problem.contains(expected), "{expected:?}: {problem}");
    }
}

#[test]
fn a_task_has_no_other_key_than_its_fair_tier() {
    let fair = |per: &str| {
        small(|text| {
            let text = text.replace("\"classic\"", "\"postgres\"\nfair = \"customer\"");
            let task = format!("{{ tier = \"main\", limit = {{ running = 1, per = \"{per}\" }} }}");
            text.replace(
                "\"mail.send\" = \"main\"",
                &format!("\"mail.send\" = {task}"),
            )
        })
    };
    assert!(fair("customer").is_ok());
    let problem = the_problem(fair("order"));
    assert!(
        problem
            .contains("has a limit per \"order\", and its tier \"main\" is fair by \"customer\""),
        "{problem}"
    );
}

#[tokio::test]
async fn limits_that_need_a_database_are_refused_without_one() {
    let connect = |map: Topology| {
        let builder = Tierline::builder(map).amqp("amqp://localhost:1");
        builder.connect_timeout(Duration::ZERO).connect_lazy()
    };
    for map in [
        tier("{ running = 4 }"),
        task("{ running = 4 }"),
        task("{ running = 4, scope = \"process\" }"),
    ] {
        let error = connect(map.unwrap()).unwrap_err();
        let is_refused = matches!(
            &error,
            Error::Topology(TopologyError::LimitsWithoutDatabase { .. })
        );
        assert!(is_refused, "{error}");
        assert!(error.to_string().contains("scope = \"process\""), "{error}");
    }
    let alone = tier("{ running = 4, scope = \"process\" }").unwrap();
    assert!(connect(alone).is_ok());
}
