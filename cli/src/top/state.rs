//! What `tierline top` shows, and what keys do to it. Pure.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use tierline::rollup::Rollup;
use tierline::stats::{Stats, TierStats};

use super::history::History;

/// The longest reason.
const LONGEST_REASON: usize = 200;

/// What is shown.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) app: String,
    /// `None`: the first answer is still to come.
    pub(super) stats: Option<Stats>,
    pub(super) history: History,
    /// The tasks of the tier that is looked into.
    pub(super) tasks: Vec<Rollup>,
    pub(super) order: Order,
    /// The tier that the cursor is on, by its name: the order changes.
    pub(super) selected: Option<String>,
    pub(super) view: View,
    /// What the operator is asked.
    pub(super) question: Option<Question>,
    /// What happened last, and whether it failed.
    pub(super) message: Option<(String, bool)>,
    pub(super) has_colours: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    #[default]
    Tiers,
    /// The selected tier.
    Tier,
    Help,
}

/// The order of tiers.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    Map,
    Waiting,
    Oldest,
    Rate,
    Dead,
}

/// A change that is to be confirmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) change: Change,
    pub(super) reason: String,
    /// Set when Enter was pressed without a reason.
    pub(super) lacks_reason: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    PauseTier(String),
    ResumeTier(String),
    ResumeGroup(String),
}

/// What is to be done outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    Quit,
    /// Ask the servers now.
    Refresh,
    Make(Change, String),
}

impl Order {
    const ALL: [Self; 5] = [
        Self::Map,
        Self::Waiting,
        Self::Oldest,
        Self::Rate,
        Self::Dead,
    ];

    fn next(self) -> Self {
        let place = Self::ALL
            .iter()
            .position(|it| *it == self)
            .unwrap_or_default();
        Self::ALL[(place + 1) % Self::ALL.len()]
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Order::Map => "the map's order",
            Order::Waiting => "waiting",
            Order::Oldest => "oldest",
            Order::Rate => "in/s",
            Order::Dead => "dead letters of the last hour",
        }
    }
}

impl Change {
    /// `pause tier bulk`.
    pub(super) fn name(&self) -> String {
        match self {
            Change::PauseTier(tier) => format!("pause tier {tier}"),
            Change::ResumeTier(tier) => format!("resume tier {tier}"),
            Change::ResumeGroup(group) => format!("resume group {group}"),
        }
    }
}

impl State {
    /// The tiers in the order that was chosen.
    pub(super) fn tiers(&self) -> Vec<&TierStats> {
        let mut tiers: Vec<&TierStats> = self.stats.iter().flat_map(|it| &it.tiers).collect();
        let descending = |tiers: &mut Vec<&TierStats>, of: fn(&TierStats) -> f64| {
            // A stable sort: those that are equal stay in the order of the map.
            tiers.sort_by(|one, other| of(other).total_cmp(&of(one)));
        };
        match self.order {
            Order::Map => {}
            Order::Waiting => descending(&mut tiers, |it| {
                it.waiting.map_or(-1.0, |count| count.count as f64)
            }),
            Order::Oldest => descending(&mut tiers, |it| {
                it.oldest.map_or(-1.0, |oldest| oldest.age.as_secs_f64())
            }),
            Order::Rate => descending(&mut tiers, |it| it.rate_in.unwrap_or(-1.0)),
            Order::Dead => descending(&mut tiers, |it| {
                let dead = it.dead.as_ref();
                dead.and_then(|dead| dead.last_hour)
                    .map_or(-1.0, |dead| dead as f64)
            }),
        }
        tiers
    }

    /// The tier that the cursor is on: the first, until it was moved.
    pub(super) fn tier(&self) -> Option<&TierStats> {
        let tiers = self.tiers();
        tiers.get(self.cursor()).copied()
    }

    /// The line of the cursor.
    pub(super) fn cursor(&self) -> usize {
        let mut tiers = self.tiers().into_iter();
        let found = tiers.position(|tier| Some(&tier.tier) == self.selected.as_ref());
        found.unwrap_or_default()
    }

    /// Does what a key is for.
    pub(super) fn press(&mut self, key: KeyEvent) -> Option<Action> {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && key.code == KeyCode::Char('c') {
            return Some(Action::Quit);
        }
        if self.question.is_some() {
            return self.answer(key.code);
        }
        self.message = None;
        match (self.view, key.code) {
            (View::Tiers, KeyCode::Char('q') | KeyCode::Esc) => return Some(Action::Quit),
            (View::Tier | View::Help, KeyCode::Char('q') | KeyCode::Esc | KeyCode::Backspace) => {
                self.view = View::Tiers;
            }
            (View::Help, _) => self.view = View::Tiers,
            (_, KeyCode::Char('?' | 'h')) => self.view = View::Help,
            (_, KeyCode::Up | KeyCode::Char('k')) => return self.step(false),
            (_, KeyCode::Down | KeyCode::Char('j')) => return self.step(true),
            (View::Tiers, KeyCode::Enter) if self.tier().is_some() => {
                self.selected = self.tier().map(|tier| tier.tier.clone());
                self.view = View::Tier;
                self.tasks.clear();
                return Some(Action::Refresh);
            }
            (View::Tier, KeyCode::Enter) => self.view = View::Tiers,
            (View::Tiers, KeyCode::Char('s')) => {
                self.selected = self.tier().map(|tier| tier.tier.clone());
                self.order = self.order.next();
            }
            (_, KeyCode::Char('r')) => return Some(Action::Refresh),
            (_, KeyCode::Char('p')) => self.ask(),
            _ => {}
        }
        None
    }

    fn step(&mut self, is_down: bool) -> Option<Action> {
        let (tiers, cursor) = (self.tiers(), self.cursor());
        let next = match is_down {
            true => (cursor + 1).min(tiers.len().saturating_sub(1)),
            false => cursor.saturating_sub(1),
        };
        let selected = tiers.get(next).map(|tier| tier.tier.clone());
        if self.view == View::Tier && selected != self.selected {
            self.tasks.clear();
            self.selected = selected;
            return Some(Action::Refresh);
        }
        self.selected = selected;
        None
    }

    /// Asks whether to pause or resume the tier of the cursor.
    fn ask(&mut self) {
        let Some(tier) = self.tier() else {
            return;
        };
        let change = match &tier.paused {
            None => Change::PauseTier(tier.tier.clone()),
            Some(pause) if pause.of_group => Change::ResumeGroup(tier.group.clone()),
            Some(_) => Change::ResumeTier(tier.tier.clone()),
        };
        self.question = Some(Question {
            change,
            reason: String::new(),
            lacks_reason: false,
        });
    }

    fn answer(&mut self, key: KeyCode) -> Option<Action> {
        let question = self.question.as_mut()?;
        match key {
            KeyCode::Esc => {
                self.question = None;
                self.message = Some(("nothing was changed".to_owned(), false));
            }
            KeyCode::Enter if question.reason.trim().is_empty() => question.lacks_reason = true,
            KeyCode::Enter => {
                let Question { change, reason, .. } = self.question.take()?;
                self.message = Some((format!("{} …", change.name()), false));
                return Some(Action::Make(change, reason.trim().to_owned()));
            }
            KeyCode::Backspace => drop(question.reason.pop()),
            KeyCode::Char(letter) if !letter.is_control() => {
                question.lacks_reason = false;
                if question.reason.chars().count() < LONGEST_REASON {
                    question.reason.push(letter);
                }
            }
            _ => {}
        }
        None
    }
}
