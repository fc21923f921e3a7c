//! The rules under `promtool`, the test tool of Prometheus.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tierline_testbed::Promtool;

use super::day::Day;
use super::{faults, hotel, rules, shop};

/// All that fires, by the labels that people see. Two alerts for one fault would count as 2.
const FIRING: &str = "count by (alertname, severity, tier, group) (ALERTS{alertstate=\"firing\"})";

async fn promtool() -> Promtool {
    let promtool = Promtool::provide().await.unwrap();
    promtool
        .write("shop.rules.yml", &rules(&shop()).to_string())
        .unwrap();
    promtool
}

/// A test in the form of `promtool`: what an expression gives in the minute `at` of a day.
fn test_of(name: &str, day: &Day, at: u32, expression: &str, expected: Value) -> Value {
    json!({
        "name": name,
        "interval": "1m",
        "input_series": day.series(),
        "promql_expr_test": [{
            "expr": expression,
            "eval_time": format!("{at}m"),
            "exp_samples": expected,
        }],
    })
}

/// A file of one test. Rules over days are evaluated less often: `promtool` takes a while for each time.
fn file(test: &Value, day: &Day) -> String {
    let interval = if day.minutes() > 40 * 60 { "15m" } else { "1m" };
    let rules = rules(&shop());
    // promtool evaluates groups in any order unless it is told, and alerts read what the first group has recorded.
    let order: Vec<&str> = rules.groups.iter().map(|it| it.name.as_str()).collect();
    json!({
        "rule_files": ["shop.rules.yml"],
        "evaluation_interval": interval,
        "group_eval_order": order,
        "tests": [test],
    })
    .to_string()
}

fn sample([alert, severity, tier, group]: [&str; 4]) -> Value {
    let labels = [
        ("alertname", alert),
        ("severity", severity),
        ("tier", tier),
        ("group", group),
    ];
    let labels = labels.iter().filter(|(_, value)| !value.is_empty());
    let labels: Vec<_> = labels
        .map(|(key, value)| format!("{key}=\"{value}\""))
        .collect();
    json!({ "labels": format!("{{{}}}", labels.join(",")), "value": 1 })
}

#[tokio::test]
async fn each_fault_raises_its_alerts_once_and_no_other() {
    let promtool = promtool().await;
    let mut wrong = Vec::new();
    for fault in faults::all() {
        let expected = fault.fires.iter().map(|alert| sample(*alert)).collect();
        let test = test_of(fault.name, &fault.day, fault.at, FIRING, expected);
        promtool
            .write("fault.yml", &file(&test, &fault.day))
            .unwrap();
        let tested = promtool.test_rules("fault.yml").await;
        if let Err(error) = tested {
            wrong.push(format!("{}: {error:#}", fault.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn every_alert_has_a_fault_that_raises_it() {
    let raised: BTreeSet<&str> = faults::all()
        .iter()
        .flat_map(|fault| fault.fires.iter().map(|[alert, ..]| *alert))
        .collect();
    for topology in [shop(), hotel()] {
        let rules = rules(&topology);
        for alert in rules.alerts() {
            assert!(
                raised.contains(alert),
                "no fault in faults.rs raises {alert}"
            );
        }
    }
    assert_eq!(raised, rules(&shop()).alerts().into_iter().collect());
}

#[tokio::test]
async fn a_good_day_leaves_all_alerts_silent() {
    let promtool = promtool().await;
    let day = Day::good(26 * 60);
    let ever = "count by (alertname) (count_over_time(ALERTS{alertstate=\"firing\"}[2d]))";
    let silent = test_of("a good day", &day, day.minutes(), ever, json!([]));
    promtool.write("good.yml", &file(&silent, &day)).unwrap();
    promtool.test_rules("good.yml").await.unwrap();
}

#[tokio::test]
async fn an_alert_says_what_happens_and_links_to_its_entry() {
    let promtool = promtool().await;
    let mut day = Day::good(180);
    day.judge("urgent", |at| (at - 120.0).max(0.0) * 6.0);
    let mut test = test_of(
        "text",
        &day,
        180,
        "vector(1)",
        json!([{ "labels": "{}", "value": 1 }]),
    );
    test["alert_rule_test"] = json!([{
        "alertname": "TierlineSloBurnFast",
        "eval_time": "180m",
        "exp_alerts": [{
            "exp_labels": { "app": "shop", "tier": "urgent", "group": "front", "severity": "page" },
            "exp_annotations": {
                "summary": "shop: urgent uses up its error budget fast",
                "description": "10% of the starts in urgent were later than 5s, and the objective is 99.9 % on time. At \
                                this rate the budget of a month is gone within days.",
                "runbook_url": "https://docs.rs/tierline/latest/tierline/guide/alerts/index.html#tierlinesloburnfast",
            },
        }],
    }]);
    promtool.write("text.yml", &file(&test, &day)).unwrap();
    promtool.test_rules("text.yml").await.unwrap();
}

#[tokio::test]
async fn the_rules_of_any_map_and_any_factor_are_valid() {
    use tierline::topology::export::{RuleSettings, Rules};
    let promtool = promtool().await;
    for topology in [shop(), hotel()] {
        for factor in [1, 7, 60, 3_600] {
            let settings = RuleSettings::new(&topology).shortened_by(factor);
            let text = Rules::new(&topology, &settings).to_string();
            assert_eq!(
                text.contains(&format!("shortened by a factor of {factor}")),
                factor > 1
            );
            promtool.write("some.rules.yml", &text).unwrap();
            promtool.check_rules("some.rules.yml").await.unwrap();
        }
    }
}

#[tokio::test]
async fn prometheus_takes_the_configuration_of_the_compose_file() {
    let promtool = promtool().await;
    let text = include_str!("../../../../docs/observe/prometheus.yml");
    promtool.write("prometheus.yml", text).unwrap();
    promtool
        .check_configuration("prometheus.yml")
        .await
        .unwrap();
}
