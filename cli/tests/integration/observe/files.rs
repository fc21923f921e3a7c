//! The files of rules and dashboard, as the command prints them and as they are in `docs/observe`.

use std::collections::BTreeSet;
use std::process::Command;

use saphyr::{LoadableYamlNode, Scalar, Yaml};
use serde_json::{Value, json};
use tierline::topology::export::{RuleSettings, Rules, dashboard};

use super::panels::{PanelQuery, panel_queries};
use super::{hotel, rules, shop};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn export(arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tierline"));
    command.current_dir(ROOT);
    command.args(["topology", "export", "topology/hotel.toml"]);
    let output = command.args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

#[test]
fn the_hotels_rules_and_dashboard_are_those_of_its_map() {
    for (option, file) in [
        ("--prometheus", "docs/observe/hotel.rules.yml"),
        ("--grafana", "docs/observe/hotel.dashboard.json"),
    ] {
        let (code, printed, error) = export(&[option]);
        assert_eq!((code, error.as_str()), (0, ""));
        let committed = std::fs::read_to_string(format!("{ROOT}/{file}")).unwrap();
        assert!(
            printed == committed,
            "{file} is not what the map gives now; write it again:\n  \
             cargo run -p tierline-cli -- topology export topology/hotel.toml {option} > {file}"
        );
    }
}

#[test]
fn the_rules_file_says_the_same_as_its_json() {
    let odd = "a=\"\\\\\",b=~\"é: #'\"";
    for topology in [shop(), hotel()] {
        let settings = RuleSettings::new(&topology).selector(odd).shortened_by(60);
        let rules = Rules::new(&topology, &settings);
        let documents = Yaml::load_from_str(&rules.to_string()).unwrap();
        assert_eq!(read_back(&documents[0]), json!(rules));
    }
    let (code, printed, _) = export(&["--prometheus", "--json"]);
    let printed: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((code, printed), (0, json!(rules(&hotel()))));
}

fn read_back(yaml: &Yaml<'_>) -> Value {
    match yaml {
        Yaml::Value(Scalar::String(text)) => json!(text),
        Yaml::Sequence(entries) => entries.iter().map(read_back).collect(),
        Yaml::Mapping(entries) => entries
            .iter()
            .map(|(key, value)| (key.as_str().unwrap().to_owned(), read_back(value)))
            .collect(),
        other => panic!("neither a text, a list nor a mapping: {other:?}"),
    }
}

#[test]
fn every_alert_has_an_entry_in_the_guide() {
    let page = std::fs::read_to_string(format!("{ROOT}/src/guide/alerts.md")).unwrap();
    let entries: Vec<(&str, &str)> = page
        .split("\n## ")
        .skip(1)
        .map(|entry| entry.split_once('\n').unwrap())
        .collect();
    let named: BTreeSet<&str> = entries.iter().map(|(name, _)| *name).collect();
    assert_eq!(named, rules(&shop()).alerts().into_iter().collect());
    for (name, entry) in entries {
        for part in ["**Means:** ", "**First looks:** ", "**Do:** "] {
            assert!(entry.contains(part), "the entry of {name} has no {part}");
        }
    }
}

#[test]
fn a_rule_carries_the_labels_and_texts_that_people_need() {
    let topology = hotel();
    let settings = RuleSettings::new(&topology).runbook("https://wiki.example/alerts");
    let rules = json!(Rules::new(&topology, &settings));
    let groups = rules["groups"].as_array().unwrap().iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().unwrap());
    let alerts: Vec<&Value> = rules.filter(|rule| rule["alert"].is_string()).collect();
    assert!(alerts.len() > 60, "{}", alerts.len());
    for alert in alerts {
        let (labels, texts) = (&alert["labels"], &alert["annotations"]);
        assert_eq!(labels["app"], "hotel");
        assert!(["page", "ticket"].contains(&labels["severity"].as_str().unwrap()));
        if let Some(tier) = labels["tier"].as_str() {
            let group = topology
                .groups()
                .iter()
                .find(|it| labels["group"] == it.name);
            assert!(group.unwrap().tiers.iter().any(|it| it == tier), "{labels}");
        }
        for text in ["summary", "description"] {
            assert!(texts[text].as_str().unwrap().len() > 20, "{texts}");
        }
        let anchor = alert["alert"].as_str().unwrap().to_lowercase();
        let link = format!("https://wiki.example/alerts#{anchor}");
        assert_eq!(texts["runbook_url"].as_str(), Some(link.as_str()));
    }
}

#[test]
fn the_dashboard_has_a_row_for_each_tier_and_its_panels_do_not_overlap() {
    let topology = hotel();
    let dashboard = dashboard(
        &topology,
        &RuleSettings::new(&topology).selector("ns=\"x\""),
    );
    let panels = dashboard["panels"].as_array().unwrap();
    let rows = panels.iter().filter(|panel| panel["type"] == "row");
    let titles: Vec<&str> = rows.map(|row| row["title"].as_str().unwrap()).collect();
    let expected = [
        "All tiers",
        "critical: 99.9 % start within 5s",
        "high: 99 % start within 30s",
        "calls: 99 % start within 30s",
        "normal: 99 % start within 2m",
        "low: 99 % start within 10m",
        "bulk: no SLO",
        "The app",
    ];
    assert_eq!(titles, expected);

    let (mut ids, mut places) = (BTreeSet::new(), BTreeSet::new());
    let open = panels.iter().filter(|panel| panel["type"] != "row");
    for panel in open {
        let place = &panel["gridPos"];
        let corner = (place["x"].as_u64().unwrap(), place["y"].as_u64().unwrap());
        assert!(places.insert(corner), "{panel:#}");
        assert!(ids.insert(panel["id"].as_u64().unwrap()));
        assert_eq!(panel["datasource"]["uid"], "${datasource}");
    }
    assert_eq!(dashboard["templating"]["list"][0]["name"], "datasource");
    for PanelQuery { title, query, .. } in panel_queries(&dashboard) {
        assert!(query.contains("{ns=\"x\""), "{title}: {query}");
    }
}

#[test]
fn a_selector_with_braces_is_refused() {
    for selector in ["{job=\"hotel\"}", "", "hotel", "a=\"b\"\nc=\"d\""] {
        let (code, out, error) = export(&["--prometheus", "--selector", selector]);
        assert_eq!((code, out.as_str()), (2, ""), "{selector}");
        assert!(error.contains("without braces"), "{error}");
    }
}

#[test]
fn every_query_of_the_dashboard_is_in_the_table_of_its_answers() {
    let table = std::fs::read_to_string(format!("{ROOT}/docs/observe/panels.md")).unwrap();
    let topology = hotel();
    let dashboard = dashboard(&topology, &RuleSettings::new(&topology));
    for panel in panel_queries(&dashboard) {
        let PanelQuery { title, legend, .. } = &panel;
        let line = format!("| {title} | {legend} | {} | ", panel.cell());
        assert!(
            table.contains(&line),
            "docs/observe/panels.md has no answer of {line}; its head says how to write it again"
        );
    }
}
