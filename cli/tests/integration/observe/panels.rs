//! The queries of a dashboard, and what a Prometheus answers them.

use std::collections::BTreeSet;

use serde_json::Value;
use tierline_testbed::Prometheus;

/// A query of a panel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PanelQuery {
    /// The row that the panel is in.
    pub(super) row: String,
    pub(super) title: String,
    pub(super) legend: String,
    pub(super) query: String,
}

/// What a query returned.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    /// The values that are numbers, by the values of their labels.
    pub(super) values: Vec<(String, f64)>,
}

/// The queries of all panels of a dashboard, those in closed rows too.
pub(super) fn panel_queries(dashboard: &Value) -> Vec<PanelQuery> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut queries = Vec::new();
    let mut row = String::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        if panel["type"] == "row" {
            row = text(&panel["title"]);
        }
        let inside = panel["panels"].as_array().into_iter().flatten();
        for panel in std::iter::once(panel).chain(inside) {
            for target in panel["targets"].as_array().into_iter().flatten() {
                queries.push(PanelQuery {
                    row: row.clone(),
                    title: text(&panel["title"]),
                    legend: text(&target["legendFormat"]),
                    query: text(&target["expr"]),
                });
            }
        }
    }
    queries
}

impl PanelQuery {
    /// Asks with what Grafana puts into queries itself. `None`: no value is a number.
    pub(super) async fn ask(&self, prometheus: &Prometheus) -> Option<Answer> {
        let query = self
            .query
            .replace("$__rate_interval", "10s")
            .replace("$__range", "1m");
        let series = prometheus.query(&query).await.unwrap();
        let value = |series: &Value| {
            let value: f64 = series["value"][1].as_str()?.parse().ok()?;
            let labels = series["metric"].as_object().into_iter().flatten();
            let labels: Vec<_> = labels.filter_map(|(_, value)| value.as_str()).collect();
            (!value.is_nan()).then(|| (labels.join(" "), value))
        };
        let values: Vec<_> = series.iter().filter_map(value).collect();
        (!values.is_empty()).then_some(Answer { values })
    }

    /// The query in a cell of a table.
    pub(super) fn cell(&self) -> String {
        let words: Vec<_> = self.query.split_whitespace().collect();
        format!("`{}`", words.join(" ").replace('|', "\\|"))
    }
}

impl Answer {
    pub(super) fn is_all_zero(&self) -> bool {
        self.values.iter().all(|(_, value)| *value == 0.0)
    }

    pub(super) fn cell(&self) -> String {
        let shown = self.values.iter().map(|(labels, value)| {
            let value = match value.fract() == 0.0 {
                true => format!("{value}"),
                false => format!("{value:.3}"),
            };
            format!("{labels} {value}").trim().to_owned()
        });
        shown.collect::<Vec<_>>().join(", ")
    }
}

/// What the expressions of rules select: `tierline_waiting{job="hotel",tier="critical"}`.
pub(super) fn selected(rules: &Value) -> BTreeSet<String> {
    let groups = rules["groups"].as_array().unwrap().iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().unwrap());
    let all = rules.flat_map(|rule| selectors(rule["expr"].as_str().unwrap()));
    all.collect()
}

fn selectors(expression: &str) -> Vec<String> {
    let parts: Vec<&str> = expression.split('{').collect();
    let pairs = parts.windows(2).filter_map(|pair| {
        let is_of_name = |it: char| it.is_alphanumeric() || it == '_' || it == ':';
        let name = pair[0].rsplit(|it| !is_of_name(it)).next()?;
        let (matchers, _) = pair[1].split_once('}')?;
        Some(format!("{name}{{{matchers}}}"))
    });
    pairs.collect()
}
