//! The columns of the list of tiers. Which of them there are depends on the width.

use ratatui::layout::Alignment;
use ratatui::style::Style;
use tierline::stats::TierStats;

use super::colours::Colours;
use crate::figures::{UNKNOWN, count, keeps_slo, number, oldest, rate, share, some_duration};

pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) width: u16,
    /// From which width of the terminal on it is shown.
    from: u16,
    pub(super) alignment: Alignment,
    pub(super) cell: fn(&TierStats, Colours) -> (String, Style),
}

const fn column(
    title: &'static str,
    width: u16,
    from: u16,
    cell: fn(&TierStats, Colours) -> (String, Style),
) -> Column {
    Column {
        title,
        width,
        from,
        alignment: Alignment::Right,
        cell,
    }
}

/// After the tier's name, and before the sparkline of what has come in.
const COLUMNS: [Column; 12] = [
    column("WAITING", 8, 0, waiting),
    column("OLDEST", 8, 0, |tier, colours| {
        let is_late = tier
            .oldest
            .zip(tier.slo)
            .is_some_and(|(oldest, slo)| oldest.age > slo.start);
        (
            oldest(tier.oldest),
            if is_late { colours.bad() } else { Style::new() },
        )
    }),
    column("RUN", 4, 0, |tier, _| (number(tier.running), Style::new())),
    column("CONS", 4, 100, consumers),
    column("IN/s", 5, 0, |tier, _| (rate(tier.rate_in), Style::new())),
    column("OUT/s", 5, 0, |tier, _| (rate(tier.rate_out), Style::new())),
    column("P50", 6, 110, |tier, _| {
        (some_duration(tier.wait_p50), Style::new())
    }),
    column("P99", 6, 0, |tier, colours| {
        (
            some_duration(tier.wait_p99),
            colours.verdict(keeps_slo(tier)),
        )
    }),
    column("SLO", 6, 0, |tier, _| {
        (some_duration(tier.slo.map(|slo| slo.start)), Style::new())
    }),
    column("BUDGET", 7, 100, |tier, colours| {
        let left = tier.slo.and_then(|slo| slo.budget_left);
        (share(left), colours.verdict(left.map(|left| left > 0.0)))
    }),
    column("DEAD", 6, 0, |tier, colours| {
        let dead = tier.dead.as_ref();
        let grows = dead
            .and_then(|it| it.last_five_minutes)
            .is_some_and(|dead| dead > 0);
        let style = if grows { colours.bad() } else { Style::new() };
        (number(dead.map(|dead| dead.dead)), style)
    }),
    column("+1h", 5, 0, growth),
];

/// The columns for a terminal of this width.
pub(super) fn columns(width: u16) -> Vec<&'static Column> {
    COLUMNS
        .iter()
        .filter(|column| width >= column.from)
        .collect()
}

fn waiting(tier: &TierStats, colours: Colours) -> (String, Style) {
    let waits = tier.waiting.is_some_and(|waiting| waiting.count > 0);
    let style = match tier.paused {
        Some(_) => colours.held(),
        None if waits && tier.consumers == Some(0) => colours.bad(),
        None => Style::new(),
    };
    (count(tier.waiting), style)
}

fn consumers(tier: &TierStats, colours: Colours) -> (String, Style) {
    let style = match tier.consumers {
        Some(0) if tier.paused.is_none() => colours.bad(),
        _ => Style::new(),
    };
    (number(tier.consumers.map(Into::into)), style)
}

fn growth(tier: &TierStats, colours: Colours) -> (String, Style) {
    let dead = tier.dead.as_ref();
    match dead.and_then(|dead| dead.last_hour) {
        None => (UNKNOWN.to_owned(), Style::new()),
        Some(0) => (String::new(), Style::new()),
        Some(grown) => (format!("+{}", number(Some(grown))), colours.bad()),
    }
}
