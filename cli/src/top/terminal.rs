//! The terminal: taken over, and given back as it was, also after a panic, SIGTERM and SIGHUP.

use std::io::{self, IsTerminal};
use std::thread;
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::{DefaultTerminal, crossterm};
use tokio::sync::mpsc;

use crate::output::Failure;

/// How long the thread that reads keys takes to notice the end.
const NOTICE: Duration = Duration::from_millis(100);

/// The terminal in raw mode, on its alternate screen. Dropped, it is as it was.
pub(super) struct Screen(pub(super) DefaultTerminal);

impl Screen {
    /// Takes the terminal over. A panic gives it back before its message is printed.
    pub(super) fn take() -> Result<Self, Failure> {
        if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
            return Err(Failure::Misused(
                "`tierline top` needs a terminal; for programs there is `tierline stats --json`"
                    .to_owned(),
            ));
        }
        let taken = ratatui::try_init();
        taken.map(Self).map_err(|error| {
            ratatui::restore();
            Failure::Misused(format!("cannot use the terminal: {error}"))
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// What the user does.
pub(super) enum Input {
    Key(event::KeyEvent),
    Resized,
    /// Nothing more can be read.
    Ended,
}

/// Reads keys on a thread of their own: reading blocks. It ends soon after the receiver is dropped.
pub(super) fn inputs() -> mpsc::Receiver<Input> {
    let (sender, inputs) = mpsc::channel(16);
    thread::spawn(move || {
        while !sender.is_closed() {
            let input = match next_event() {
                Ok(None) => continue,
                Ok(Some(Event::Key(key))) if key.kind != KeyEventKind::Release => Input::Key(key),
                Ok(Some(Event::Resize(..))) => Input::Resized,
                Ok(Some(_)) => continue,
                Err(_) => Input::Ended,
            };
            let is_over = matches!(input, Input::Ended);
            if sender.blocking_send(input).is_err() || is_over {
                return;
            }
        }
    });
    inputs
}

fn next_event() -> io::Result<Option<Event>> {
    match crossterm::event::poll(NOTICE)? {
        true => event::read().map(Some),
        false => Ok(None),
    }
}
