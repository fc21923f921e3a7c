//! The pictures and the keys.

use std::time::{Duration, SystemTime};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};
use tierline::stats::Stats;

use super::history::History;
use super::state::{Action, Change, Order, State, View};
use super::view::draw;

fn tier(name: &str, waiting: u64, changes: Value) -> Value {
    let count = |count: u64| json!({ "count": count, "or_more": false });
    let mut tier = json!({
        "tier": name, "group": "urgent", "home": "classic", "waiting": count(waiting), "messages": waiting,
        "rows": count(0), "by_priority": null, "quarantined": count(0), "oldest": null, "in_flight": count(2),
        "running": 2, "consumers": 3, "processes": 3, "in_per_second": 12.4, "out_per_second": 12.1,
        "wait_p50_seconds": 0.004, "wait_p99_seconds": 0.8,
        "slo": { "start_seconds": 5.0, "objective": 0.99, "met_last_hour": 1.0, "budget_left": 0.97 },
        "dead": {
            "dead": 0, "redriving": 0, "redriven": 0, "discarded": 0, "uncollected": 0,
            "last_five_minutes": 0, "last_hour": 0,
        },
        "relay_waiting": count(0), "scheduled": count(0), "delayed_messages": null, "parked": count(0),
        "paused": null, "limit": null,
    });
    for (field, value) in changes.as_object().unwrap() {
        tier[field] = value.clone();
    }
    tier
}

fn stats() -> Stats {
    let late = json!({
        "oldest": { "seconds": 760.0, "is_estimate": true }, "wait_p99_seconds": 9.5,
        "slo": { "start_seconds": 5.0, "objective": 0.99, "met_last_hour": 0.91, "budget_left": -8.0 },
        "dead": {
            "dead": 1_204, "redriving": 0, "redriven": 3, "discarded": 0, "uncollected": 0,
            "last_five_minutes": 4, "last_hour": 31,
        },
    });
    let deep = json!({
        "group": "deferred", "home": "postgres", "waiting": { "count": 10_000, "or_more": true }, "messages": null,
        "by_priority": [
            { "priority": 9, "rows": { "count": 12, "or_more": false } },
            { "priority": 0, "rows": { "count": 9_988, "or_more": true } },
        ],
        "oldest": { "seconds": 7_300.0, "is_estimate": false }, "slo": null,
        "paused": {
            "of_group": false, "who": "ada", "why": "the provider is down", "since": "2026-11-19T22:00:00Z",
            "until": null,
        },
    });
    let silent = json!({
        "waiting": null, "messages": null, "consumers": null, "in_flight": null,
    });
    let read = json!({
        "app": "hotel", "at": "2026-11-19T23:05:23.500Z", "took_seconds": 0.026,
        "tiers": [
            tier("critical", 3, json!({})), tier("high", 40, late), tier("a-tier-with-a-long-name", 0, silent),
            tier("bulk", 10_000, deep),
        ],
        "groups": [
            { "group": "urgent", "processes": 3, "slots": 24, "running": 6 },
            { "group": "deferred", "processes": 1, "slots": 4, "running": 0 },
        ],
        "paused_tasks": ["report.export"], "relays": 0,
        "schedules": { "count": 3, "paused": 0, "has_leader": false, "next_due": null },
        "problems": [{ "server": "broker", "problem": "the broker did not say within 1.8s what is in hotel.low" }],
    });
    serde_json::from_value(read).unwrap()
}

fn state() -> State {
    State {
        app: "hotel".to_owned(),
        stats: Some(stats()),
        has_colours: true,
        ..State::default()
    }
}

fn lines(state: &State, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state)).unwrap();
    let buffer = terminal.backend().buffer();
    let lines = buffer.content().chunks(width.into()).map(|cells| {
        let line: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
        line.trim_end().to_owned()
    });
    lines.collect()
}

/// The cells of a picture whose style is red: what is to be looked at.
fn red(state: &State, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state)).unwrap();
    let buffer = terminal.backend().buffer();
    let mut words: Vec<String> = Vec::new();
    let mut goes_on = false;
    for cell in buffer.content() {
        let is_red = cell.style().fg == Some(ratatui::style::Color::Red);
        if is_red && !cell.symbol().trim().is_empty() {
            match (goes_on, words.last_mut()) {
                (true, Some(word)) => word.push_str(cell.symbol()),
                _ => words.push(cell.symbol().to_owned()),
            }
        }
        goes_on = is_red && !cell.symbol().trim().is_empty();
    }
    words
}

fn press(state: &mut State, code: KeyCode) -> Option<Action> {
    state.press(KeyEvent::new(code, KeyModifiers::NONE))
}

fn write(state: &mut State, text: &str) {
    for letter in text.chars() {
        assert_eq!(press(state, KeyCode::Char(letter)), None);
    }
}

#[test]
fn eighty_columns_show_every_tier_and_what_is_wrong() {
    let lines = lines(&state(), 80, 18);
    let expected = "\
tierline top: hotel                               1 problem  23:05:23 UTC, 26 ms
TIER            WAITING   OLDEST  RUN  IN/s OUT/s    P99    SLO   DEAD   +1h
critical              3        -    2    12    12 800 ms    5 s      0
high                 40 ≈ 13 min    2    12    12  9.5 s    5 s  1,204   +31
a-tier-with-a…        -        -    2    12    12 800 ms    5 s      0
bulk           ≥ 10,000    2.0 h    2    12    12 800 ms      -      0

bulk: paused by ada
groups: urgent 3 proc, 6/24 slots; deferred 1 proc, 0/4 slots
paused tasks: report.export
3 schedules, and no process leads
not known: the broker did not say within 1.8s what is in hotel.low
sorted by the map's order




↑↓ tier  Enter look into it  s sort  p pause/resume  ? help  q quit";
    assert_eq!(lines.join("\n"), expected);
    assert!(lines.iter().all(|line| line.chars().count() <= 80));
}

#[test]
fn a_hundred_and_twenty_columns_show_more_of_them() {
    let lines = lines(&state(), 120, 12);
    for title in ["CONS", "P50", "BUDGET", "OUT by minute"] {
        assert!(lines[1].contains(title), "{title}: {}", lines[1]);
    }
    assert!(lines[3].contains("-800%"), "{}", lines[3]);
}

#[test]
fn what_is_late_or_dying_is_red_and_only_where_colours_are_wanted() {
    let red_words = red(&state(), 80, 18);
    for word in ["9.5", "13", "1,204", "+31", "not", "leads"] {
        assert!(
            red_words.iter().any(|it| it == word),
            "{word}: {red_words:?}"
        );
    }
    assert!(!red_words.iter().any(|it| it == "800"), "{red_words:?}");
    let plain = State {
        has_colours: false,
        ..state()
    };
    assert_eq!(red(&plain, 80, 18), Vec::<String>::new());
}

#[test]
fn a_terminal_of_any_size_is_drawn_to() {
    for view in [View::Tiers, View::Tier, View::Help] {
        for (width, height) in [(1, 1), (10, 3), (40, 5), (80, 24), (500, 100)] {
            let mut state = State { view, ..state() };
            lines(&state, width, height);
            press(&mut state, KeyCode::Char('p'));
            lines(&state, width, height);
        }
    }
    lines(&State::default(), 80, 24);
}

#[test]
fn enter_looks_into_the_tier_of_the_cursor_and_escape_leads_back() {
    let mut state = state();
    for _ in 0..9 {
        press(&mut state, KeyCode::Down);
    }
    assert_eq!(press(&mut state, KeyCode::Enter), Some(Action::Refresh));
    let shown = lines(&state, 80, 24).join("\n");
    assert!(
        shown.contains("bulk (rows in Postgres, group deferred)"),
        "{shown}"
    );
    assert!(
        shown.contains("by priority     9: 12   0: ≥ 9,988"),
        "{shown}"
    );
    assert!(shown.contains("because: the provider is down"), "{shown}");
    press(&mut state, KeyCode::Esc);
    assert_eq!(state.view, View::Tiers);
    assert_eq!(press(&mut state, KeyCode::Char('q')), Some(Action::Quit));
}

#[test]
fn the_cursor_stays_on_its_tier_in_every_order() {
    let mut state = state();
    press(&mut state, KeyCode::Down);
    let names = |state: &State| -> Vec<String> {
        state.tiers().iter().map(|tier| tier.tier.clone()).collect()
    };
    for order in [
        Order::Waiting,
        Order::Oldest,
        Order::Rate,
        Order::Dead,
        Order::Map,
    ] {
        press(&mut state, KeyCode::Char('s'));
        assert_eq!(state.order, order);
        assert_eq!(names(&state)[state.cursor()], "high");
    }
    press(&mut state, KeyCode::Char('s'));
    assert_eq!(
        names(&state),
        ["bulk", "high", "critical", "a-tier-with-a-long-name"]
    );
}

#[test]
fn a_pause_needs_a_reason_and_escape_changes_nothing() {
    let mut state = state();
    press(&mut state, KeyCode::Char('p'));
    assert_eq!(press(&mut state, KeyCode::Enter), None);
    assert!(
        lines(&state, 80, 24)
            .join("\n")
            .contains("A reason is needed")
    );
    // Keys are letters of the reason now.
    write(&mut state, "q is down");
    let shown = lines(&state, 80, 24).join("\n");
    assert!(
        shown.contains("pause tier critical?") && shown.contains("Reason: q is down"),
        "{shown}"
    );
    assert_eq!(press(&mut state, KeyCode::Esc), None);
    assert_eq!(state.question, None);
    press(&mut state, KeyCode::Char('p'));
    write(&mut state, "the provider is down");
    let made = press(&mut state, KeyCode::Enter);
    let change = Change::PauseTier("critical".to_owned());
    assert_eq!(
        made,
        Some(Action::Make(change, "the provider is down".to_owned()))
    );
}

#[test]
fn what_is_paused_is_resumed_whether_it_is_the_tier_or_its_group() {
    let mut state = state();
    state.selected = Some("bulk".to_owned());
    press(&mut state, KeyCode::Char('p'));
    let change = |state: &State| state.question.as_ref().unwrap().change.clone();
    assert_eq!(change(&state), Change::ResumeTier("bulk".to_owned()));
    press(&mut state, KeyCode::Esc);
    let tiers = &mut state.stats.as_mut().unwrap().tiers;
    tiers[3].paused.as_mut().unwrap().of_group = true;
    press(&mut state, KeyCode::Char('p'));
    assert_eq!(change(&state), Change::ResumeGroup("deferred".to_owned()));
}

#[test]
fn names_from_elsewhere_do_nothing_to_the_terminal() {
    let mut state = state();
    let tiers = &mut state.stats.as_mut().unwrap().tiers;
    tiers[3].paused.as_mut().unwrap().who = "ada\u{1b}[31m\nx".to_owned();
    let shown = lines(&state, 80, 18).join("\n");
    assert!(shown.contains("paused by ada\u{fffd}[31m x"), "{shown}");
}

#[test]
fn the_minute_that_is_not_over_is_not_a_bar() {
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(3_600 * 24 + 30);
    assert_eq!(History::new(&[], now), History::default());
    let history = History::default();
    assert_eq!(
        history.last("critical", 10, |minute| minute.ended),
        Vec::<u64>::new()
    );
}
