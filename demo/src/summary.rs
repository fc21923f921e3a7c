//! The summary: every tier against its SLO, the audit of all confirmed tasks, and the two
//! nights side by side.

use std::fmt::{self, Write};

use tierline::dead::Summary;

use crate::meter::Figures;
use crate::night::{Ending, Left};
use crate::view::{judged_p99, slo, slo_alone, wait, wait_p99};

impl Ending {
    /// Whether every confirmed task has a known end and nothing is left on the servers.
    pub(crate) fn is_well(&self) -> bool {
        self.audit.lost.is_empty() && self.left.is_nothing()
    }

    /// The night in a table and a few lines.
    pub(crate) fn summary(&self, colours: bool) -> String {
        let mut text = format!("\n{}: {:.0} s\n", self.title, self.took.as_secs_f64());
        let _ = writeln!(
            text,
            "{:<9}{:>7}{:>10}{:>10}{:>13}{:>9}{:>7}{:>10}",
            "tier", "done", "wait p50", "wait p99", "SLO", "retries", "died", "redriven"
        );
        for figures in &self.figures {
            let _ = writeln!(text, "{}", row(figures, colours));
        }
        self.write_audit(&mut text);
        text
    }

    fn write_audit(&self, text: &mut String) {
        let audit = &self.audit;
        let verdict = match audit.lost.len() {
            0 => "nothing lost".to_owned(),
            lost => format!("{lost} LOST"),
        };
        let _ = write!(
            text,
            "{verdict}: {} {} = {} done + {} dead",
            audit.confirmed,
            self.left.stored(),
            audit.done,
            audit.dead
        );
        for (count, what) in [
            (audit.expired, "expired"),
            (audit.lost.len(), "nowhere to be found"),
        ] {
            if count > 0 {
                let _ = write!(text, " + {count} {what}");
            }
        }
        let _ = writeln!(text, "\n  {} ran twice, {}", audit.repeated, self.left);
        for lost in &audit.lost {
            let _ = writeln!(text, "  lost: {lost}");
        }
        for letter in &self.dead {
            let _ = writeln!(text, "  {}", describe(letter));
        }
        if self.refused > 0 {
            let _ = writeln!(
                text,
                "  {} publishes were refused, and promise nothing",
                self.refused
            );
        }
    }
}

impl Left {
    fn is_nothing(&self) -> bool {
        match self {
            Left::InQueues { messages, .. } => *messages == 0,
            Left::InTables { rows } => *rows == 0,
        }
    }

    /// How the tasks were stored.
    fn stored(&self) -> &'static str {
        match self {
            Left::InQueues { .. } => "confirmed by the broker",
            Left::InTables { .. } => "committed in Postgres",
        }
    }
}

impl fmt::Display for Left {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Left::InQueues { messages, queues } => {
                write!(out, "{messages} messages are left in {queues} queues")
            }
            Left::InTables { rows } => write!(
                out,
                "{rows} rows are left in the tables of ready, scheduled and running tasks"
            ),
        }
    }
}

fn row(figures: &Figures, colours: bool) -> String {
    format!(
        "{:<9}{:>7}{:>10}{}{}{:>9}{:>7}{:>10}",
        figures.tier,
        figures.done,
        wait(figures.wait_p50),
        wait_p99(figures, 10, colours),
        slo(figures, 13, colours),
        figures.retries,
        figures.died,
        figures.redriven,
    )
}

fn describe(letter: &Summary) -> String {
    format!(
        "dead: {}, {} after {} attempts:\n        {}",
        letter.task.as_deref().unwrap_or("unknown"),
        letter.reason,
        letter.attempts,
        letter.error.as_deref().unwrap_or("no error is known"),
    )
}

/// The effect of tiers: the p99 of both nights, tier by tier.
pub(crate) fn side_by_side(flat: &Ending, tiered: &Ending, colours: bool) -> String {
    let mut text = String::from("\nside by side, the same load and as many slots: wait p99\n");
    let _ = writeln!(
        text,
        "{:<9}{:>8}{:>14}{:>14}",
        "tier", "SLO", "one queue", "tiers"
    );
    for (one, other) in flat.figures.iter().zip(&tiered.figures) {
        let _ = writeln!(
            text,
            "{:<9}{:>8}{}{}",
            one.tier,
            slo_alone(one),
            judged_p99(one, 14, colours),
            judged_p99(other, 14, colours),
        );
    }
    text
}
