//! A dashboard for Grafana.
//!
//! It is in the classic JSON model (`schemaVersion` 42), which every release imports and file provisioning reads. Releases
//! from 13 on convert it to their second schema when they load it; older ones could not read that.

use serde_json::{Value, json};

use super::super::Topology;
use super::panels::{Panel, Row, rows};
use super::prometheus::RuleSettings;

const SCHEMA_VERSION: u32 = 42;
const WIDTH: usize = 8;
const HEIGHT: usize = 7;
const PER_LINE: usize = 3;
/// Grafana refuses longer ones.
const LONGEST_UID: usize = 40;

/// The dashboard for a map, as the JSON that Grafana imports: a row for all tiers, one for each tier, the most urgent first,
/// and one for the app. Its queries need no recorded series.
///
/// ```
/// # use tierline::topology::export::{RuleSettings, dashboard};
/// let topology = tierline::Topology::load("topology/hotel.toml")?;
/// let dashboard = dashboard(&topology, &RuleSettings::new(&topology));
/// assert_eq!(dashboard["title"], "hotel: tiers");
/// # Ok::<(), tierline::Error>(())
/// ```
pub fn dashboard(topology: &Topology, settings: &RuleSettings) -> Value {
    let app = topology.app();
    let mut panels = Vec::new();
    let (mut top, mut next_id) = (0, 1);
    for (number, row) in rows(topology, settings).iter().enumerate() {
        // What comes first is open; a browser that draws all panels at once asks Prometheus for all of them.
        let is_open = number < 2;
        panels.extend(place(row, is_open, &mut top, &mut next_id));
    }
    let uid: String = format!("tierline-{app}")
        .chars()
        .take(LONGEST_UID)
        .collect();
    json!({
        "uid": uid,
        "title": format!("{app}: tiers"),
        "description": format!(
            "Written by `tierline topology export --grafana`. Its queries select series by {}.", settings.selector
        ),
        "tags": ["tierline", app],
        "schemaVersion": SCHEMA_VERSION,
        "editable": true,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": { "from": "now-6h", "to": "now" },
        "refresh": "30s",
        "templating": { "list": [{
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
            "hide": 0,
            "multi": false,
            "includeAll": false,
            "refresh": 1,
        }] },
        "annotations": { "list": [{
            "name": "Alerts of this app",
            "enable": true,
            "iconColor": "red",
            "datasource": source(),
            "expr": format!("ALERTS{{app=\"{app}\",alertstate=\"firing\"}}"),
            "titleFormat": "{{alertname}} {{tier}}",
        }] },
        "panels": panels,
    })
}

/// A row and its panels. Those of a closed row are inside it.
fn place(row: &Row, is_open: bool, top: &mut usize, next_id: &mut usize) -> Vec<Value> {
    let mut id = || {
        *next_id += 1;
        *next_id - 1
    };
    let mut heading = json!({
        "id": id(),
        "type": "row",
        "title": row.title,
        "collapsed": !is_open,
        "gridPos": { "h": 1, "w": 24, "x": 0, "y": *top },
        "panels": [],
    });
    *top += 1;
    let placed = row.panels.iter().enumerate().map(|(number, panel)| {
        let (x, y) = (number % PER_LINE * WIDTH, number / PER_LINE * HEIGHT + *top);
        panel_json(panel, id(), x, y)
    });
    let placed: Vec<Value> = placed.collect();
    if !is_open {
        heading["panels"] = json!(placed);
        return vec![heading];
    }
    *top += row.panels.len().div_ceil(PER_LINE) * HEIGHT;
    [heading].into_iter().chain(placed).collect()
}

fn panel_json(panel: &Panel, id: usize, x: usize, y: usize) -> Value {
    let targets = panel
        .queries
        .iter()
        .zip('A'..)
        .map(|((legend, query), letter)| {
            json!({
                "refId": letter,
                "datasource": source(),
                "expr": query,
                "legendFormat": legend,
                "instant": panel.is_stat,
                "range": !panel.is_stat,
            })
        });
    let targets: Vec<Value> = targets.collect();
    let colours = ["yellow", "orange", "red"];
    let steps = panel.lines.iter().zip(colours);
    let steps = steps.map(|(line, colour)| json!({ "value": line, "color": colour }));
    let first = json!({ "value": null, "color": "green" });
    let steps: Vec<Value> = [first].into_iter().chain(steps).collect();
    let shown = if panel.lines.is_empty() {
        "off"
    } else {
        "line"
    };
    let (kind, options) = match panel.is_stat {
        true => (
            "stat",
            json!({ "reduceOptions": { "calcs": ["lastNotNull"], "values": false }, "textMode": "value_and_name" }),
        ),
        false => (
            "timeseries",
            json!({ "legend": { "displayMode": "list", "placement": "bottom" }, "tooltip": { "mode": "multi" } }),
        ),
    };
    json!({
        "id": id,
        "type": kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": source(),
        "gridPos": { "h": HEIGHT, "w": WIDTH, "x": x, "y": y },
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "thresholds": { "mode": "absolute", "steps": steps },
                "custom": { "thresholdsStyle": { "mode": shown } },
            },
            "overrides": [],
        },
        "options": options,
        "targets": targets,
    })
}

fn source() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}
