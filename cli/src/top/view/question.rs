//! Asks for a confirmation and a reason.

use ratatui::Frame;
use ratatui::layout::{Margin, Rect};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Block, Clear, Paragraph, Wrap};

use crate::table::plain;
use crate::top::colours::Colours;
use crate::top::state::{Change, Question};

const WIDTH: u16 = 66;
const HEIGHT: u16 = 9;

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, question: &Question, colours: Colours) {
    let (width, height) = (WIDTH.min(area.width), HEIGHT.min(area.height));
    let place = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    frame.render_widget(Clear, place);
    let title = plain(&format!(" {}? ", question.change.name()));
    let block = Block::bordered().title(title).border_style(colours.held());
    frame.render_widget(block, place);
    let what = match question.change {
        Change::PauseTier(_) => {
            "Nothing of it starts until somebody resumes it. What runs goes on to its end, what waits stays."
        }
        Change::ResumeTier(_) => "Its tasks start again within two seconds.",
        Change::ResumeGroup(_) => "The tasks of all its tiers start again within two seconds.",
    };
    // The end of a long reason is what is being written.
    let room = usize::from(width).saturating_sub(14);
    let letters = question.reason.chars().count();
    let reason: String = question
        .reason
        .chars()
        .skip(letters.saturating_sub(room))
        .collect();
    let hint = match question.lacks_reason {
        true => Line::styled(
            "A reason is needed: it goes to the audit log.",
            colours.bad(),
        ),
        false => Line::styled("Enter: do it   Esc: change nothing", colours.faint()),
    };
    let text = Text::from(vec![
        Line::raw(what),
        Line::raw(""),
        Line::raw(format!("Reason: {}▏", plain(&reason))),
        Line::raw(""),
        hint,
    ]);
    let inner = place.inner(Margin::new(2, 1));
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), inner);
}
