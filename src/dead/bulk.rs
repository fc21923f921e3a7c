//! Many dead letters back: in batches, at a rate, after a canary, stoppable and resumable.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::run::Run;
use super::{DeadLetters, Filter, Operation, OperationKind, OperationState, State};
use crate::Error;

/// A few first: the rest follows only when enough of them succeed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Canary {
    /// How many go first.
    pub count: u32,
    /// The share of them that must succeed, from 0 to 1.
    pub success: f64,
    /// How long to wait for their outcome.
    pub wait: Duration,
}

impl Canary {
    /// So many first, nine of ten of which must succeed within ten minutes.
    pub fn of(count: u32) -> Self {
        Self {
            count: count.max(1),
            success: 0.9,
            wait: Duration::from_secs(600),
        }
    }

    /// The share of them that must succeed, from 0 to 1.
    pub fn success(mut self, share: f64) -> Self {
        self.success = if share.is_finite() {
            share.clamp(0.0, 1.0)
        } else {
            1.0
        };
        self
    }

    /// How long to wait for their outcome.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }
}

/// A redrive of many rows that is about to run. Get it from [`DeadLetters::redrive_all`].
#[must_use = "a redrive does nothing until it runs"]
pub struct BulkRedrive {
    letters: DeadLetters,
    pub(super) filter: Filter,
    pub(super) settings: Settings,
    pub(super) progress: Option<Box<Progress>>,
}

type Progress = dyn Fn(&Operation) + Send + Sync;

/// What a redrive was begun with, for whoever resumes it.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Settings {
    pub(super) rate: Option<u32>,
    pub(super) canary: Option<Canary>,
}

impl DeadLetters {
    /// Redrives every dead row that a filter means, the oldest first. What dies while it runs is left
    /// to the next.
    pub fn redrive_all(&self, filter: Filter) -> BulkRedrive {
        BulkRedrive {
            letters: self.clone(),
            filter,
            settings: Settings::default(),
            progress: None,
        }
    }

    /// Whether a redrive can be [resumed](Self::resume), as far as can be told without doing it.
    ///
    /// # Errors
    /// As resuming it.
    pub async fn resumable(&self, id: i64) -> Result<Operation, Error> {
        self.publisher()?;
        let operation = self.operation(id).await?;
        let refused = |problem: &str| Error::BulkRefused {
            id,
            problem: problem.into(),
        };
        match (operation.action, operation.state) {
            (OperationKind::Discard | OperationKind::Purge, _) => {
                Err(refused("only a redrive can be resumed"))
            }
            (_, OperationState::Done) => Err(refused("it is done")),
            _ => Ok(operation),
        }
    }

    /// Goes on with a redrive that was stopped, or whose process died: that one must not have been
    /// heard of for as long as the [lease](Self::lease).
    ///
    /// # Errors
    /// [`Error::BulkNotFound`]; [`Error::BulkRefused`] where it is done or still runs; as every use of
    /// the database.
    pub async fn resume(&self, id: i64) -> Result<Operation, Error> {
        self.resumable(id).await?;
        let known = self.known_operation(id).await?;
        let refused = |problem: &str| Error::BulkRefused {
            id,
            problem: problem.into(),
        };
        let runner = uuid::Uuid::now_v7().to_string();
        let taking = sqlx::query(
            "UPDATE tierline.dead_letter_operations SET state = 'running', runner = $3, \
             heard_at = now(), ended_at = NULL, note = '' WHERE app = $1 AND id = $2 \
             AND (state = 'stopped' OR state <> 'done' \
                  AND heard_at < now() - make_interval(secs => $4))",
        )
        .bind(self.app())
        .bind(id)
        .bind(&runner)
        .bind(self.lease.as_secs_f64())
        .execute(self.database.pool());
        let taken = self.within("resume an operation", taking).await?;
        if taken.rows_affected() == 0 {
            return Err(refused(
                "it still runs; stop it first, or wait until its process is not heard of",
            ));
        }
        // A stopped run may still be publishing what it claimed; one that died is not.
        let died = known.operation.state != OperationState::Stopped;
        self.take_up(died.then_some(&*known.runner)).await?;
        let filter = serde_json::from_value(known.operation.filter.clone());
        let bulk = BulkRedrive {
            letters: self.clone(),
            filter: filter.map_err(|_| refused("its filter cannot be read by this release"))?,
            settings: serde_json::from_str(&known.settings).unwrap_or_default(),
            progress: None,
        };
        bulk.work(id, &runner, known.upto).await
    }
}

impl BulkRedrive {
    /// At most so many a second. Default: as fast as the broker confirms.
    pub fn rate(mut self, per_second: u32) -> Self {
        self.settings.rate = Some(per_second.max(1));
        self
    }

    /// A few first; the rest only when enough of them succeed.
    pub fn canary(mut self, canary: Canary) -> Self {
        self.settings.canary = Some(canary);
        self
    }

    /// Tells how far it is, after every batch.
    pub fn on_progress(mut self, progress: impl Fn(&Operation) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Notes down what is to be done, without doing it: [`DeadLetters::resume`] does, here or in
    /// another process.
    ///
    /// # Errors
    /// [`Error::InvalidFilter`], and as every use of the database.
    pub async fn prepare(self) -> Result<Operation, Error> {
        let runner = uuid::Uuid::now_v7().to_string();
        let (id, _) = self.begin(&runner).await?;
        let stopped = OperationState::Stopped;
        self.letters
            .end(id, &runner, stopped, "not begun yet")
            .await
    }

    /// Runs to its end, until it is [stopped](DeadLetters::stop), or until nothing more can be
    /// published; then the operation's state and note say so, and it can be resumed.
    ///
    /// # Errors
    /// [`Error::InvalidFilter`], and as every use of the database; then it can be resumed too.
    pub async fn run(self) -> Result<Operation, Error> {
        let runner = uuid::Uuid::now_v7().to_string();
        let (id, upto) = self.begin(&runner).await?;
        self.work(id, &runner, upto).await
    }

    async fn begin(&self, runner: &str) -> Result<(i64, i64), Error> {
        self.letters.publisher()?;
        self.filter.check()?;
        if self.filter.state.is_some_and(|state| state != State::Dead) {
            return Err(Error::InvalidFilter {
                problem: "only what is dead can be redriven: leave `state` out".into(),
            });
        }
        self.letters.take_up(None).await?;
        let dead = self.filter.clone().state(State::Dead);
        let extent = self.letters.extent(&dead).await?;
        let settings = serde_json::to_string(&self.settings).unwrap_or_default();
        let action = OperationKind::Redrive;
        let beginning = self
            .letters
            .begin(action, &self.filter, &settings, runner, extent);
        Ok((beginning.await?, extent.0))
    }

    async fn work(&self, id: i64, runner: &str, upto: i64) -> Result<Operation, Error> {
        let run = Run {
            bulk: self,
            filter: Filter {
                state: None,
                ..self.filter.clone()
            },
            letters: &self.letters,
            id,
            runner,
            upto,
        };
        let (state, note) = run.all().await?;
        let ended = self.letters.end(id, runner, state, &note).await?;
        self.tell(&ended);
        Ok(ended)
    }

    pub(super) fn tell(&self, operation: &Operation) {
        if let Some(progress) = &self.progress {
            progress(operation);
        }
    }
}
