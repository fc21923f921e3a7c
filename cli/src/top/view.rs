//! Draws the state. Pure: the same state is the same picture.

mod help;
mod question;
mod tier;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState, Wrap};
use serde_json::json;
use tierline::stats::Stats;

use super::colours::Colours;
use super::columns::columns;
use super::history::sparkline;
use super::state::{State, View};
use crate::figures::{notes, number, thousands};
use crate::table::plain;

/// The shortest sparkline that says anything.
const SHORTEST_SPARKLINE: u16 = 4;
const LONGEST_SPARKLINE: u16 = 30;
const NARROWEST_NAME: usize = 8;
/// A longer name would leave no room for figures.
const WIDEST_NAME: usize = 14;
/// Notes of the tier of the cursor, problems and groups.
const MOST_NOTES: u16 = 7;

pub(super) fn draw(frame: &mut Frame<'_>, state: &State) {
    let area = frame.area();
    let colours = Colours(state.has_colours);
    let [head, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(title(state, head.width, colours)), head);
    match state.view {
        View::Tiers => draw_tiers(frame, body, state, colours),
        View::Tier => tier::draw(frame, body, state, colours),
        View::Help => help::draw(frame, body),
    }
    frame.render_widget(Paragraph::new(foot_line(state, colours)), foot);
    if let Some(question) = &state.question {
        question::draw(frame, body, question, colours);
    }
}

/// The app on the left, the time on the right.
fn title(state: &State, width: u16, colours: Colours) -> Line<'static> {
    let left = format!("tierline top: {}", plain(&state.app));
    let right = match &state.stats {
        None => "asking the servers …".to_owned(),
        Some(stats) => {
            let at = json!(stats)["at"].as_str().unwrap_or_default().to_owned();
            let time = at.get(11..19).unwrap_or_default();
            let problems = match stats.problems.len() {
                0 => String::new(),
                1 => "1 problem  ".to_owned(),
                number => format!("{number} problems  "),
            };
            format!("{problems}{time} UTC, {} ms", stats.took.as_millis())
        }
    };
    let used = left.chars().count() + right.chars().count();
    let gap = usize::from(width).saturating_sub(used).max(1);
    let has_problems = state
        .stats
        .as_ref()
        .is_some_and(|it| !it.problems.is_empty());
    let style = if has_problems {
        colours.bad()
    } else {
        Style::new()
    };
    Line::from(vec![
        Span::styled(left, colours.head()),
        Span::raw(" ".repeat(gap)),
        Span::styled(right, style),
    ])
}

fn foot_line(state: &State, colours: Colours) -> Line<'static> {
    let message = state.message.as_ref();
    // A list has room for a long one.
    let message = message.filter(|(_, is_failure)| !is_failure || state.view != View::Tiers);
    if let Some((message, is_failure)) = message {
        let style = if *is_failure {
            colours.bad()
        } else {
            colours.good()
        };
        return Line::styled(plain(message), style);
    }
    let keys: &str = match state.view {
        View::Tiers => "↑↓ tier  Enter look into it  s sort  p pause/resume  ? help  q quit",
        View::Tier => "↑↓ tier  Esc all tiers  p pause/resume  r ask now  ? help",
        View::Help => "any key: back",
    };
    Line::styled(keys, colours.faint())
}

fn draw_tiers(frame: &mut Frame<'_>, area: Rect, state: &State, colours: Colours) {
    let Some(stats) = &state.stats else {
        return;
    };
    let below = below(state, stats, colours);
    let rows = u16::try_from(stats.tiers.len() + 1).unwrap_or(u16::MAX);
    // The list comes first, and what it leaves is for what is below.
    let below_height = area
        .height
        .saturating_sub(rows + 1)
        .min(u16::try_from(below.lines.len()).unwrap_or(MOST_NOTES));
    let [list, _, notes] = Layout::vertical([
        Constraint::Max(rows),
        Constraint::Length(1),
        Constraint::Min(below_height),
    ])
    .areas(area);
    draw_list(frame, list, state, colours);
    frame.render_widget(Paragraph::new(below).wrap(Wrap { trim: false }), notes);
}

fn draw_list(frame: &mut Frame<'_>, area: Rect, state: &State, colours: Colours) {
    let tiers = state.tiers();
    let longest = tiers.iter().map(|tier| tier.tier.chars().count()).max();
    let name = longest
        .unwrap_or_default()
        .clamp(NARROWEST_NAME, WIDEST_NAME);
    let name = u16::try_from(name).unwrap_or_default();
    let columns = columns(area.width);
    let used: u16 = name + columns.iter().map(|column| column.width + 1).sum::<u16>();
    let rest = area.width.saturating_sub(used + 1);
    let has_sparkline = rest >= SHORTEST_SPARKLINE;
    let spark = rest.min(LONGEST_SPARKLINE);

    let mut head = vec![Cell::new("TIER")];
    head.extend(
        columns
            .iter()
            .map(|column| cell(column.title.to_owned(), Style::new(), column.alignment)),
    );
    if has_sparkline {
        head.push(Cell::new(if spark >= 10 { "OUT by minute" } else { "OUT" }));
    }
    let rows = tiers.iter().map(|tier| {
        let mut cells = vec![Cell::new(cut(&plain(&tier.tier), name))];
        cells.extend(columns.iter().map(|column| {
            let (text, style) = (column.cell)(tier, colours);
            cell(text, style, column.alignment)
        }));
        if has_sparkline {
            let figures = state
                .history
                .last(&tier.tier, spark.into(), |minute| minute.ended);
            cells.push(Cell::new(sparkline(&figures)));
        }
        Row::new(cells)
    });
    let mut widths = vec![Constraint::Length(name)];
    widths.extend(
        columns
            .iter()
            .map(|column| Constraint::Length(column.width)),
    );
    if has_sparkline {
        widths.push(Constraint::Length(spark));
    }
    let table = Table::new(rows, widths)
        .header(Row::new(head).style(colours.head()))
        .column_spacing(1)
        .row_highlight_style(colours.cursor());
    let mut cursor = TableState::new().with_selected(state.cursor());
    frame.render_stateful_widget(table, area, &mut cursor);
}

fn cell(text: String, style: Style, alignment: ratatui::layout::Alignment) -> Cell<'static> {
    Cell::new(Text::styled(text, style).alignment(alignment))
}

fn cut(text: &str, width: u16) -> String {
    let width = usize::from(width);
    match text.chars().count() > width {
        true => text
            .chars()
            .take(width.saturating_sub(1))
            .chain(['…'])
            .collect(),
        false => text.to_owned(),
    }
}

/// What is out of the ordinary, of the tier of the cursor first.
fn below(state: &State, stats: &Stats, colours: Colours) -> Text<'static> {
    let mut lines = Vec::new();
    if let Some((message, true)) = &state.message {
        lines.push(Line::styled(plain(message), colours.bad()));
    }
    let tiers = state.tiers();
    let noted = tiers.iter().map(|tier| (tier, notes(tier)));
    for (tier, notes) in noted.filter(|(_, notes)| !notes.is_empty()) {
        let text = plain(&format!("{}: {}", tier.tier, notes.join("; ")));
        let style = match tier.paused {
            Some(_) => colours.held(),
            None => Style::new(),
        };
        lines.push(Line::styled(text, style));
    }
    let groups = stats.groups.iter().filter_map(|group| {
        let (processes, slots) = (group.processes?, group.slots?);
        let busy = number(group.running);
        Some(format!(
            "{} {processes} proc, {busy}/{slots} slots",
            group.group
        ))
    });
    let groups: Vec<String> = groups.collect();
    if !groups.is_empty() {
        lines.push(Line::raw(plain(&format!("groups: {}", groups.join("; ")))));
    }
    if let Some(tasks) = stats
        .paused_tasks
        .as_ref()
        .filter(|tasks| !tasks.is_empty())
    {
        let text = plain(&format!("paused tasks: {}", tasks.join(", ")));
        lines.push(Line::styled(text, colours.held()));
    }
    if let Some(schedules) = stats
        .schedules
        .as_ref()
        .filter(|schedules| !schedules.has_leader)
    {
        let text = format!(
            "{} schedules, and no process leads",
            thousands(schedules.count.into())
        );
        lines.push(Line::styled(text, colours.bad()));
    }
    for problem in &stats.problems {
        let text = plain(&format!("not known: {}", problem.problem));
        lines.push(Line::styled(text, colours.bad()));
    }
    lines.push(Line::styled(
        format!("sorted by {}", state.order.name()),
        colours.faint(),
    ));
    Text::from(lines)
}
