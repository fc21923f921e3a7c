//! One tier in full.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, Wrap};
use tierline::rollup::Rollup;
use tierline::stats::{TierHome, TierStats};

use super::cut;
use crate::figures::{
    UNKNOWN, count, duration, keeps_slo, notes, number, oldest, rate, share, some_duration,
    thousands,
};
use crate::table::plain;
use crate::top::colours::Colours;
use crate::top::history::{MINUTES, Minute, sparkline};
use crate::top::state::State;

/// The width of a label of a figure, and of the figure.
const LABEL: usize = 16;
const FIGURE: usize = 22;

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, colours: Colours) {
    let Some(tier) = state.tier() else {
        return;
    };
    let top = top(tier, state, area.width, colours);
    let height = u16::try_from(top.lines.len()).unwrap_or(u16::MAX);
    let [figures, tasks] =
        Layout::vertical([Constraint::Max(height), Constraint::Min(0)]).areas(area);
    frame.render_widget(Paragraph::new(top).wrap(Wrap { trim: false }), figures);
    draw_tasks(frame, tasks, &state.tasks, colours);
}

fn top(tier: &TierStats, state: &State, width: u16, colours: Colours) -> Text<'static> {
    let home = match tier.home {
        TierHome::Classic => "a classic queue",
        TierHome::Quorum => "a quorum queue",
        TierHome::Postgres => "rows in Postgres",
        _ => "another home",
    };
    let title = plain(&format!("{} ({home}, group {})", tier.tier, tier.group));
    let mut lines = vec![Line::styled(title, colours.head())];
    lines.extend(figures(tier, colours));
    if let Some(priorities) = tier.by_priority.as_ref().filter(|it| !it.is_empty()) {
        let shown = priorities
            .iter()
            .map(|it| format!("{}: {}", it.priority, it.rows));
        lines.push(Line::raw(format!(
            "{:<LABEL$}{}",
            "by priority",
            shown.collect::<Vec<_>>().join("   ")
        )));
    }
    let room = usize::from(width).saturating_sub(LABEL + 14).min(MINUTES);
    let minutes = |name: &str, of: fn(&Minute) -> u64| {
        let figures = state.history.last(&tier.tier, room, of);
        let most = figures.iter().copied().max().unwrap_or_default();
        Line::raw(format!(
            "{name:<LABEL$}{}  max {}",
            sparkline(&figures),
            thousands(most)
        ))
    };
    lines.push(Line::raw(""));
    lines.push(minutes("in by minute", |minute| minute.arrived));
    lines.push(minutes("out by minute", |minute| minute.ended));
    lines.push(minutes("dead by minute", |minute| minute.dead));
    let notes = notes(tier).into_iter().map(|note| plain(&note));
    lines.extend(notes.map(|note| Line::styled(note, colours.held())));
    if let Some(pause) = tier.paused.as_ref().filter(|pause| !pause.why.is_empty()) {
        lines.push(Line::styled(
            plain(&format!("because: {}", pause.why)),
            colours.held(),
        ));
    }
    lines.push(Line::raw(""));
    Text::from(lines)
}

/// Two figures on each line.
fn figures(tier: &TierStats, colours: Colours) -> Vec<Line<'static>> {
    let none = Style::new();
    let slo = tier.slo;
    let dead = tier.dead.as_ref();
    let grown = |dead: Option<u64>| match dead {
        Some(dead) if dead > 0 => colours.bad(),
        _ => none,
    };
    let (five_minutes, hour) = (
        dead.and_then(|dead| dead.last_five_minutes),
        dead.and_then(|dead| dead.last_hour),
    );
    let objective = slo.map(|slo| {
        format!(
            "{}, objective {}",
            duration(slo.start),
            share(Some(slo.objective))
        )
    });
    let consumers = number(tier.consumers.map(Into::into));
    let processes = number(tier.processes.map(Into::into));
    let figures = [
        (
            "waiting",
            count(tier.waiting),
            none,
            "oldest",
            oldest(tier.oldest),
            none,
        ),
        (
            "running",
            format!(
                "{}, {} in flight",
                number(tier.running),
                count(tier.in_flight)
            ),
            none,
            "consumers",
            format!("{consumers} of {processes} processes"),
            none,
        ),
        (
            "in/s",
            rate(tier.rate_in),
            none,
            "out/s",
            rate(tier.rate_out),
            none,
        ),
        (
            "wait p50",
            some_duration(tier.wait_p50),
            none,
            "wait p99",
            some_duration(tier.wait_p99),
            colours.verdict(keeps_slo(tier)),
        ),
        (
            "SLO",
            objective.unwrap_or_else(|| UNKNOWN.to_owned()),
            none,
            "met (1 h)",
            share(slo.and_then(|slo| slo.met_last_hour)),
            none,
        ),
        (
            "budget (24 h)",
            share(slo.and_then(|slo| slo.budget_left)),
            colours.verdict(slo.and_then(|slo| slo.budget_left).map(|left| left > 0.0)),
            "limit",
            tier.limit
                .as_ref()
                .map_or("none".to_owned(), |limit| limit.limit.clone()),
            none,
        ),
        (
            "dead letters",
            number(dead.map(|dead| dead.dead)),
            grown(five_minutes),
            "in 5 min, 1 h",
            format!("{}, {}", number(five_minutes), number(hour)),
            grown(hour),
        ),
        (
            "scheduled",
            count(tier.scheduled),
            none,
            "parked",
            count(tier.parked),
            none,
        ),
    ];
    let lines = figures
        .into_iter()
        .map(|(label, left, style, other, right, other_style)| {
            Line::from(vec![
                Span::raw(format!("{label:<LABEL$}")),
                Span::styled(format!("{left:<FIGURE$}"), style),
                Span::raw(format!("{other:<LABEL$}")),
                Span::styled(plain(&right), other_style),
            ])
        });
    lines.collect()
}

/// The busiest tasks of the last hour.
fn draw_tasks(frame: &mut Frame<'_>, area: Rect, tasks: &[Rollup], colours: Colours) {
    let mut tasks: Vec<&Rollup> = tasks.iter().collect();
    tasks.sort_by_key(|task| std::cmp::Reverse(task.totals.started));
    let name = area.width.saturating_sub(7 * 8).min(48);
    let rows = tasks.iter().map(|task| {
        let totals = &task.totals;
        let right = |text: String| Cell::new(Text::raw(text).right_aligned());
        let dead = match totals.dead {
            0 => right("0".to_owned()),
            dead => Cell::new(Text::styled(thousands(dead), colours.bad()).right_aligned()),
        };
        let task = task.task.as_deref().unwrap_or_default();
        Row::new(vec![
            Cell::new(cut(&plain(task), name)),
            right(thousands(totals.started)),
            right(thousands(totals.done)),
            right(thousands(totals.retried)),
            dead,
            right(some_duration(totals.wait.quantile(0.99))),
            right(some_duration(totals.run.mean())),
            right(some_duration(totals.run.quantile(0.95))),
        ])
    });
    let heads = [
        "STARTED", "DONE", "RETRIED", "DEAD", "WAIT99", "RUN", "RUN95",
    ];
    let mut head = vec![Cell::new("TASK, last hour")];
    head.extend(heads.map(|title| Cell::new(Text::raw(title).right_aligned())));
    let mut widths = vec![Constraint::Length(name)];
    widths.extend([Constraint::Length(7); 7]);
    let table = Table::new(rows, widths)
        .header(Row::new(head).style(colours.head()))
        .column_spacing(1);
    frame.render_widget(table, area);
}
