//! Colours, where the terminal's user wants any. What they say, a word or a sign says too.

use ratatui::style::{Color, Modifier, Style};

#[derive(Debug, Clone, Copy)]
pub(super) struct Colours(pub(super) bool);

impl Colours {
    fn of(self, colour: Color) -> Style {
        match self.0 {
            true => Style::new().fg(colour),
            false => Style::new(),
        }
    }

    pub(super) fn bad(self) -> Style {
        self.of(Color::Red).add_modifier(Modifier::BOLD)
    }

    pub(super) fn good(self) -> Style {
        self.of(Color::Green)
    }

    /// Of what is paused, or at its limit.
    pub(super) fn held(self) -> Style {
        self.of(Color::Yellow)
    }

    pub(super) fn faint(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    pub(super) fn head(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(super) fn cursor(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    pub(super) fn verdict(self, is_well: Option<bool>) -> Style {
        match is_well {
            Some(true) => self.good(),
            Some(false) => self.bad(),
            None => Style::new(),
        }
    }
}
