//! `tierline top`: a live view of an app in the terminal.
//!
//! `state` is what is shown and what keys do, `view` draws it (with `columns` and `colours`), both pure; `history` is what
//! happened minute by minute, and `terminal` takes the terminal over and gives it back.

pub(crate) mod arguments;
mod colours;
mod columns;
mod history;
mod state;
mod terminal;
#[cfg(test)]
mod tests;
mod view;

use std::pin::pin;
use std::time::{Duration, SystemTime};

use serde_json::json;
use tierline::control::Changed;
use tierline::rollup::Rollup;
use tierline::stats::Stats;
use tierline::{Error, Tierline};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};

use crate::arguments::read_duration;
use crate::output::{Failure, Output};
use arguments::Top as Command;
use history::{History, MINUTES};
use state::{Action, Change, State, View};
use terminal::{Input, Screen, inputs};

/// The shortest pause between two questions.
const SHORTEST_PAUSE: Duration = Duration::from_millis(500);
/// How often the rollups are read: they change about every ten seconds.
const HISTORY_EVERY: Duration = Duration::from_secs(5);
/// How long the goodbye to the servers may take.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);

/// What a refresh has found out.
enum News {
    Stats(Box<Result<Stats, Error>>),
    History(History),
    /// The tasks of this tier.
    Tasks(String, Vec<Rollup>),
    Changed(String, Box<Result<Changed, Error>>),
}

/// What is wanted of a refresh.
#[derive(Debug, Clone, Default)]
struct Wanted {
    /// The tier that is looked into.
    tier: Option<String>,
    /// Rises with each question that must not wait.
    number: u64,
}

pub(crate) async fn run(command: Command) -> Result<Output, Failure> {
    let pause = read_duration("--every", &command.every)?.max(SHORTEST_PAUSE);
    let app = command.app.connect()?;
    let screen = Screen::take()?;
    let shown = show(&app, screen, pause, &command.by).await;
    let _ = timeout(CLOSE_LIMIT, app.close()).await;
    shown.map(|()| Output::well(String::new(), json!({ "ended": true })))
}

/// Shows until the user quits. The screen is given back at the end.
async fn show(
    app: &Tierline,
    mut screen: Screen,
    pause: Duration,
    by: &str,
) -> Result<(), Failure> {
    let mut state = State {
        app: app.topology().app().to_owned(),
        has_colours: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        ..State::default()
    };
    let (news, mut learned) = mpsc::channel(8);
    let (want, wanted) = watch::channel(Wanted::default());
    let mut asking = pin!(ask(app, pause, news.clone(), wanted));
    let mut inputs = inputs();
    let mut terminated = pin!(terminated());
    loop {
        let drawn = screen.0.draw(|frame| view::draw(frame, &state));
        drawn.map_err(|error| Failure::Misused(format!("cannot draw: {error}")))?;
        let action = tokio::select! {
            input = inputs.recv() => match input {
                Some(Input::Key(key)) => state.press(key),
                Some(Input::Resized) => None,
                Some(Input::Ended) | None => Some(Action::Quit),
            },
            Some(news) = learned.recv() => {
                learn(&mut state, news);
                None
            }
            () = &mut asking => Some(Action::Quit),
            () = &mut terminated => Some(Action::Quit),
        };
        let looked_into = state.selected.clone().filter(|_| state.view == View::Tier);
        let is_urgent = action == Some(Action::Refresh);
        want.send_if_modified(|wanted| {
            wanted.number += u64::from(is_urgent);
            let is_new = std::mem::replace(&mut wanted.tier, looked_into.clone()) != looked_into;
            is_urgent || is_new
        });
        match action {
            Some(Action::Quit) => return Ok(()),
            Some(Action::Make(change, reason)) => {
                let (app, news, by) = (app.clone(), news.clone(), by.to_owned());
                let want = want.clone();
                tokio::spawn(async move {
                    let made = make(&app, &change, &reason, &by).await;
                    // Whoever has quit meanwhile need not know.
                    let _ = news
                        .send(News::Changed(change.name(), Box::new(made)))
                        .await;
                    want.send_modify(|wanted| wanted.number += 1);
                });
            }
            Some(Action::Refresh) | None => {}
        }
    }
}

/// Asks again and again, also when it is wanted at once.
async fn ask(
    app: &Tierline,
    pause: Duration,
    news: mpsc::Sender<News>,
    mut wanted: watch::Receiver<Wanted>,
) {
    let mut history_at = Instant::now();
    loop {
        let looked_into = wanted.borrow_and_update().tier.clone();
        let stats = app.stats().await;
        if news.send(News::Stats(Box::new(stats))).await.is_err() {
            return;
        }
        let (is_due, rollups) = (Instant::now() >= history_at, app.rollups());
        if let (true, Ok(rollups)) = (is_due, &rollups) {
            let span = Duration::from_secs(60 * (MINUTES as u64 + 1));
            // What the statistics could not be told either is a problem there.
            if let Ok(minutes) = rollups.last(span).every("1m").await {
                let history = History::new(&minutes, SystemTime::now());
                let _ = news.send(News::History(history)).await;
            }
            history_at = Instant::now() + HISTORY_EVERY;
        }
        if let (Some(tier), Ok(rollups)) = (looked_into, &rollups)
            && let Ok(tasks) = rollups.last("1h").tier(&tier).by_task().await
        {
            let _ = news.send(News::Tasks(tier, tasks)).await;
        }
        tokio::select! {
            () = sleep(pause) => {}
            changed = wanted.changed() => if changed.is_err() { return },
        }
    }
}

fn learn(state: &mut State, news: News) {
    match news {
        News::Stats(stats) => match *stats {
            Ok(stats) => state.stats = Some(stats),
            Err(error) => state.message = Some((error.to_string(), true)),
        },
        News::History(history) => state.history = history,
        News::Tasks(tier, tasks) => {
            if state.selected.as_ref() == Some(&tier) {
                state.tasks = tasks;
            }
        }
        News::Changed(name, made) => {
            state.message = Some(match *made {
                Ok(changed) => {
                    let notes: Vec<String> = changed
                        .notes
                        .iter()
                        .map(|note| format!("; {note}"))
                        .collect();
                    (format!("{name}: done{}", notes.concat()), false)
                }
                Err(error) => (error.to_string(), true),
            });
        }
    }
}

async fn make(app: &Tierline, change: &Change, reason: &str, by: &str) -> Result<Changed, Error> {
    let control = app.control()?.by(by);
    let change = match change {
        Change::PauseTier(tier) => control.pause_tier(tier),
        Change::ResumeTier(tier) => control.resume_tier(tier),
        Change::ResumeGroup(group) => control.resume_group(group),
    };
    change.because(reason).await
}

/// Completes when the process should end.
#[cfg(unix)]
async fn terminated() {
    use tokio::signal::unix::{SignalKind, signal};

    let signals = (
        signal(SignalKind::terminate()),
        signal(SignalKind::hangup()),
    );
    let (Ok(mut terminate), Ok(mut hangup)) = signals else {
        // Without them the terminal stays as it is when such a signal comes.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
}

#[cfg(not(unix))]
async fn terminated() {
    std::future::pending::<()>().await;
}
