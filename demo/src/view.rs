//! The live view: on a terminal a table that is redrawn in place below the messages, elsewhere plain
//! lines.
//!
//! The cursor is never hidden and no mode outlives a frame, so the terminal is usable however
//! the demo ends.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::meter::Figures;
use crate::pace::Pace;

const FRAME_EVERY: Duration = Duration::from_millis(200);
/// Without a terminal the table is printed this many times in a night.
const TABLES: f64 = 6.0;

pub(crate) struct Screen {
    kind: Kind,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Live { colours: bool },
    Lines,
}

#[derive(Default)]
struct State {
    /// Messages for the next frame.
    messages: Vec<String>,
    /// How many lines of the last frame are redrawn.
    drawn: usize,
}

/// A moment of a night.
pub(crate) struct Sight<'a> {
    pub(crate) title: &'a str,
    pub(crate) elapsed: Duration,
    pub(crate) is_provider_down: bool,
    pub(crate) figures: &'a [Figures],
}

impl Screen {
    /// A screen for standard output.
    pub(crate) fn of_output() -> Self {
        let says = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty());
        let is_dumb = says("TERM").is_none_or(|term| term == "dumb");
        // A table that is higher than the terminal cannot be redrawn in place.
        let size = rustix::termios::tcgetwinsize(io::stdout());
        let is_high = size.is_ok_and(|size| usize::from(size.ws_row) > HEIGHT);
        let colours = says("NO_COLOR").is_none();
        let kind = match io::stdout().is_terminal() && !is_dumb && is_high {
            true => Kind::Live { colours },
            false => Kind::Lines,
        };
        Self {
            kind,
            state: Mutex::default(),
        }
    }

    /// Whether colours are shown.
    pub(crate) fn has_colours(&self) -> bool {
        self.kind == Kind::Live { colours: true }
    }

    /// How long to wait between two frames.
    pub(crate) fn pause(&self, pace: Pace) -> Duration {
        match self.kind {
            Kind::Live { .. } => FRAME_EVERY,
            Kind::Lines => pace.at(1.0 / TABLES),
        }
    }

    /// Prints a message that stays on the screen.
    pub(crate) fn print_message(&self, elapsed: Duration, message: &str) -> io::Result<()> {
        let line = format!("{:>4.0} s  {message}", elapsed.as_secs_f64());
        match self.kind {
            Kind::Live { .. } => {
                self.lock().messages.push(line);
                Ok(())
            }
            Kind::Lines => print(&format!("{line}\n")),
        }
    }

    /// Shows this moment.
    pub(crate) fn draw(&self, sight: &Sight<'_>) -> io::Result<()> {
        let lines = sight.lines(self.has_colours());
        match self.kind {
            Kind::Live { .. } => print(&self.lock().frame(&lines)),
            Kind::Lines => print(&format!("{}\n", lines.join("\n"))),
        }
    }

    /// Leaves the last frame on the screen, and continues below it.
    pub(crate) fn leave(&self) {
        self.lock().drawn = 0;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The messages since the last frame, and these lines in place of the last ones.
    fn frame(&mut self, lines: &[String]) -> String {
        // Without wrapping, a long line is cut and stays one line.
        let mut frame = String::from("\x1b[?7l");
        if self.drawn > 0 {
            let _ = write!(frame, "\x1b[{}A", self.drawn);
        }
        for line in self.messages.drain(..).chain(lines.iter().cloned()) {
            let _ = write!(frame, "\r{line}\x1b[K\n");
        }
        frame.push_str("\x1b[J\x1b[?7h");
        self.drawn = lines.len();
        frame
    }
}

/// The lines of a frame: a title, the head of the table, and six tiers.
const HEIGHT: usize = 9;

impl Sight<'_> {
    fn lines(&self, colours: bool) -> Vec<String> {
        let provider = match self.is_provider_down {
            true => paint("DOWN", RED, colours),
            false => "up".to_owned(),
        };
        let seconds = self.elapsed.as_secs_f64();
        let title = format!(
            "── {} ── {seconds:.0} s ── payment provider: {provider} ──",
            self.title
        );
        let head = format!(
            "{:<9}{:>8}{:>8}{:>9}{:>9}{:>9}{:>12}{:>8}{:>6}",
            "tier",
            "waiting",
            "running",
            "starts/s",
            "wait p50",
            "wait p99",
            "SLO",
            "retries",
            "dead"
        );
        let rows = self.figures.iter().map(|figures| row(figures, colours));
        [title, head].into_iter().chain(rows).collect()
    }
}

fn row(figures: &Figures, colours: bool) -> String {
    format!(
        "{:<9}{:>8}{:>8}{:>9.1}{:>9}{}{}{:>8}{:>6}",
        figures.tier,
        figures.waiting,
        figures.running,
        figures.starts_per_second,
        wait(figures.wait_p50),
        wait_p99(figures, 9, colours),
        slo(figures, 12, colours),
        figures.retries,
        figures.dead,
    )
}

const GREEN: &str = "32";
const RED: &str = "31";

/// A tier's p99, green or red by its SLO.
pub(crate) fn wait_p99(figures: &Figures, width: usize, colours: bool) -> String {
    judged(
        &format!("{:>width$}", wait(figures.wait_p99)),
        figures,
        colours,
    )
}

/// A tier's SLO, and whether it is kept.
pub(crate) fn slo(figures: &Figures, width: usize, colours: bool) -> String {
    let text = format!("{}{}", slo_alone(figures), verdict(figures));
    judged(&format!("{text:>width$}"), figures, colours)
}

/// A tier's p99, and whether that keeps its SLO.
pub(crate) fn judged_p99(figures: &Figures, width: usize, colours: bool) -> String {
    let text = format!("{}{}", wait(figures.wait_p99), verdict(figures));
    judged(&format!("{text:>width$}"), figures, colours)
}

/// A tier's SLO.
pub(crate) fn slo_alone(figures: &Figures) -> String {
    figures.slo.map_or("none".to_owned(), |slo| wait(Some(slo)))
}

fn verdict(figures: &Figures) -> &'static str {
    match figures.keeps_slo() {
        Some(true) => " ok",
        Some(false) => " LATE",
        None => "",
    }
}

fn judged(text: &str, figures: &Figures, colours: bool) -> String {
    match figures.keeps_slo() {
        Some(true) => paint(text, GREEN, colours),
        Some(false) => paint(text, RED, colours),
        None => text.to_owned(),
    }
}

fn paint(text: &str, colour: &str, colours: bool) -> String {
    match colours {
        true => format!("\x1b[{colour}m{text}\x1b[0m"),
        false => text.to_owned(),
    }
}

/// A time for people.
pub(crate) fn wait(time: Option<Duration>) -> String {
    let Some(time) = time else {
        return "-".to_owned();
    };
    match time.as_secs_f64() {
        seconds if seconds < 1.0 => format!("{} ms", time.as_millis()),
        seconds if seconds < 9.95 && time.subsec_millis() > 0 => format!("{seconds:.1} s"),
        seconds if seconds < 120.0 => format!("{seconds:.0} s"),
        seconds => format!("{:.0} min", seconds / 60.0),
    }
}

/// Prints at once. A closed pipe is an error, which ends the demo.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(p99: u64) -> Figures {
        Figures {
            tier: "critical".to_owned(),
            slo: Some(Duration::from_secs(5)),
            wait_p50: Some(Duration::from_millis(3)),
            wait_p99: Some(Duration::from_millis(p99)),
            ..Figures::default()
        }
    }

    #[test]
    fn a_tier_is_green_within_its_slo_and_red_beyond_it() {
        assert!(row(&figures(5000), true).contains("\x1b[32m      5 s\x1b[0m"));
        assert!(row(&figures(5001), true).contains("\x1b[31m    5.0 s\x1b[0m"));
        assert!(row(&figures(5001), false).contains("5 s LATE"));
        assert!(!row(&figures(5001), false).contains('\x1b'));
    }

    #[test]
    fn a_frame_replaces_the_one_before_and_keeps_the_messages_above_it() {
        let mut state = State::default();
        state.messages.push("first".to_owned());
        let lines = ["a".to_owned(), "b".to_owned()];
        assert!(!state.frame(&lines).contains("\x1b[2A"));
        state.messages.push("second".to_owned());
        let frame = state.frame(&lines);
        assert!(
            frame.starts_with("\x1b[?7l\x1b[2A\rsecond\x1b[K\n\ra"),
            "{frame:?}"
        );
        assert!(frame.ends_with("\x1b[?7h"), "{frame:?}");
    }

    #[test]
    fn a_sight_is_as_high_as_it_says() {
        let figures = vec![figures(1); 6];
        let sight = Sight {
            title: "tiers",
            elapsed: Duration::ZERO,
            is_provider_down: true,
            figures: &figures,
        };
        assert!(sight.lines(false).len() < HEIGHT);
        assert!(sight.lines(false)[0].contains("DOWN"));
    }

    #[test]
    fn times_are_short_to_read() {
        let shown = |milliseconds| wait(Some(Duration::from_millis(milliseconds)));
        assert_eq!(shown(0), "0 ms");
        assert_eq!(shown(999), "999 ms");
        assert_eq!(shown(4200), "4.2 s");
        assert_eq!(shown(5000), "5 s");
        assert_eq!(shown(9960), "10 s");
        assert_eq!(shown(30_000), "30 s");
        assert_eq!(shown(120_000), "2 min");
        assert_eq!(wait(None), "-");
    }
}
