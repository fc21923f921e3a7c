//! Bulk redrive: in batches, at a rate, after a canary, stoppable and resumable.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::bulk_runner::BulkRunner;
use super::redrive::to_its_end;
use super::{DeadLetters, Filter, Operation, OperationKind, OperationState, State};
use crate::Error;
use crate::error::DeadLetterError;
use crate::task::IntoDuration;
use crate::topology::duration::Unreadable;

/// A sample that is redriven first. The rest follows only if enough of the sample succeeds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Canary {
    /// How many rows the sample has.
    pub count: u32,
    /// The share of them that must succeed, from 0 to 1.
    pub success: f64,
    /// How long to wait for their outcome.
    pub wait: Duration,
    #[serde(skip)]
    unreadable: Unreadable,
}

impl Canary {
    /// A sample of `count` rows, of which 90 % must succeed within ten minutes.
    pub fn of(count: u32) -> Self {
        Self {
            count: count.max(1),
            success: 0.9,
            wait: Duration::from_secs(600),
            unreadable: Unreadable::NONE,
        }
    }

    /// Sets the share of them that must succeed, from 0 to 1.
    pub fn success(mut self, share: f64) -> Self {
        self.success = if share.is_finite() {
            share.clamp(0.0, 1.0)
        } else {
            1.0
        };
        self
    }

    /// Sets how long to wait for their outcome, such as `"10m"`. A text that cannot be read is refused where the
    /// redrive runs.
    pub fn wait(mut self, wait: impl IntoDuration) -> Self {
        self.unreadable.set("wait", wait, &mut self.wait);
        self
    }
}

/// A bulk redrive that has not begun. Get it from [`DeadLetters::redrive_all`].
#[must_use = "a redrive does nothing until it runs"]
pub struct BulkRedrive {
    letters: DeadLetters,
    pub(super) filter: Filter,
    pub(super) settings: Settings,
    pub(super) progress: Option<Box<Progress>>,
}

type Progress = dyn Fn(&Operation) + Send + Sync;

/// The settings of a redrive, stored for a process that resumes it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Settings {
    pub(super) rate: Option<u32>,
    pub(super) canary: Option<Canary>,
}

impl DeadLetters {
    /// Redrives every dead row that a filter selects, the oldest first. Rows that die while it runs are not
    /// part of it.
    pub fn redrive_all(&self, filter: Filter) -> BulkRedrive {
        BulkRedrive {
            letters: self.clone(),
            filter,
            settings: Settings::default(),
            progress: None,
        }
    }

    /// Checks whether a redrive can be [resumed](Self::resume), without resuming it.
    ///
    /// # Errors
    /// As [`resume`](Self::resume).
    pub async fn resumable(&self, id: i64) -> Result<Operation, Error> {
        self.publisher()?;
        let operation = self.operation(id).await?;
        let refused = |problem: &str| {
            Error::DeadLetter(DeadLetterError::OperationRefused {
                id,
                problem: problem.into(),
            })
        };
        match (operation.action, operation.state) {
            (OperationKind::Discard | OperationKind::Purge, _) => {
                Err(refused("only a redrive can be resumed"))
            }
            (_, OperationState::Done) => Err(refused("it is done")),
            _ => Ok(operation),
        }
    }

    /// Resumes a redrive that was stopped or whose process died. A process counts as dead if it has not
    /// reported for as long as the [lease](Self::lease). If this future is dropped, the redrive stops after
    /// its batch, and can be resumed.
    ///
    /// # Errors
    /// [`DeadLetterError::OperationNotFound`]; [`DeadLetterError::OperationRefused`] if it is done or still runs; as every use of
    /// the database.
    pub async fn resume(&self, id: i64) -> Result<Operation, Error> {
        let (letters, abandoned) = (self.clone(), CancellationToken::new());
        let _when_dropped = abandoned.clone().drop_guard();
        to_its_end(async move {
            let (bulk, begun) = letters.resumed(id).await?;
            bulk.work(&begun, &abandoned).await
        })
        .await
    }

    /// Resumes it in the background, and returns when it runs. `held` is dropped when the redrive ends.
    #[cfg(feature = "admin")]
    pub(crate) async fn resume_in_background(
        &self,
        id: i64,
        held: impl Send + 'static,
    ) -> Result<Operation, Error> {
        let letters = self.clone();
        in_background(async move { letters.resumed(id).await }, held).await
    }

    async fn resumed(&self, id: i64) -> Result<(BulkRedrive, Begun), Error> {
        self.resumable(id).await?;
        let known = self.known_operation(id).await?;
        let refused = |problem: &str| {
            Error::DeadLetter(DeadLetterError::OperationRefused {
                id,
                problem: problem.into(),
            })
        };
        let filter = serde_json::from_value(known.operation.filter.clone());
        let bulk = BulkRedrive {
            letters: self.clone(),
            filter: filter.map_err(|_| refused("its filter cannot be read by this release"))?,
            settings: serde_json::from_str(&known.settings).unwrap_or_default(),
            progress: None,
        };
        let runner = uuid::Uuid::now_v7().to_string();
        let Some(operation) = self.take_over(id, &runner).await? else {
            return Err(refused(
                "it still runs; stop it first, or wait until its process has not reported for the lease",
            ));
        };
        // A stopped run may still be publishing the rows that it claimed; a dead one is not.
        let died = known.operation.state != OperationState::Stopped;
        self.take_up(died.then_some(&*known.runner)).await?;
        let begun = Begun {
            operation,
            runner,
            upto: known.upto,
        };
        Ok((bulk, begun))
    }
}

/// A redrive that runs or is about to run.
struct Begun {
    operation: Operation,
    runner: String,
    upto: i64,
}

/// Starts a redrive in the background, and returns as soon as it has begun. The redrive continues if the
/// caller goes away.
#[cfg(feature = "admin")]
async fn in_background(
    beginning: impl Future<Output = Result<(BulkRedrive, Begun), Error>> + Send + 'static,
    held: impl Send + 'static,
) -> Result<Operation, Error> {
    let (answer, answered) = tokio::sync::oneshot::channel();
    let running = async move {
        let (bulk, begun) = beginning.await?;
        let id = begun.operation.id;
        // The caller may be gone; the redrive runs anyway.
        let _ = answer.send(begun.operation.clone());
        if let Err(error) = bulk.work(&begun, &CancellationToken::new()).await {
            tracing::error!(%error, id, "a bulk redrive ended before its last row");
        }
        drop(held);
        Ok(begun.operation)
    };
    let mut running = std::pin::pin!(to_its_end(running));
    tokio::select! {
        biased;
        Ok(begun) = answered => Ok(begun),
        ended = &mut running => ended,
    }
}

impl BulkRedrive {
    /// At most `per_second` rows a second. Default: as fast as the broker confirms.
    pub fn rate(mut self, per_second: u32) -> Self {
        self.settings.rate = Some(per_second.max(1));
        self
    }

    /// Redrives a sample first, and the rest only if enough of the sample succeeds.
    pub fn canary(mut self, canary: Canary) -> Self {
        self.settings.canary = Some(canary);
        self
    }

    /// Calls a function with the progress after every batch.
    pub fn on_progress(mut self, progress: impl Fn(&Operation) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Stores the redrive without running it. [`DeadLetters::resume`] runs it, here or in another process.
    ///
    /// # Errors
    /// [`DeadLetterError::InvalidFilter`] and [`Error::InvalidDuration`], and as every use of the database.
    pub async fn prepare(self) -> Result<Operation, Error> {
        let begun = self.begin().await?;
        let (id, stopped) = (begun.operation.id, OperationState::Stopped);
        self.letters
            .end(id, &begun.runner, stopped, "not begun yet")
            .await
    }

    /// Runs until all rows are redriven, until it is [stopped](DeadLetters::stop), or until the broker
    /// accepts no more. In the last two cases the operation's state and note say so, and it can be resumed.
    /// If this future is dropped, the redrive stops after its batch.
    ///
    /// # Errors
    /// [`DeadLetterError::InvalidFilter`] and [`Error::InvalidDuration`], and as every use of the database. After a database error it can be resumed.
    pub async fn run(self) -> Result<Operation, Error> {
        let abandoned = CancellationToken::new();
        let _when_dropped = abandoned.clone().drop_guard();
        to_its_end(async move {
            let begun = self.begin().await?;
            self.work(&begun, &abandoned).await
        })
        .await
    }

    /// Runs it in the background, and returns when it runs. `held` is dropped when the redrive ends.
    #[cfg(feature = "admin")]
    pub(crate) async fn run_in_background(
        self,
        held: impl Send + 'static,
    ) -> Result<Operation, Error> {
        let beginning = async move {
            let begun = self.begin().await?;
            Ok((self, begun))
        };
        in_background(beginning, held).await
    }

    async fn begin(&self) -> Result<Begun, Error> {
        self.letters.publisher()?;
        self.filter.check()?;
        if let Some(canary) = &self.settings.canary {
            canary.unreadable.check()?;
        }
        if self.filter.state.is_some_and(|state| state != State::Dead) {
            return Err(Error::DeadLetter(DeadLetterError::InvalidFilter {
                problem: "only dead rows can be redriven: leave `state` out".into(),
            }));
        }
        self.letters.take_up(None).await?;
        let dead = self.filter.clone().state(State::Dead);
        let extent = self.letters.extent(&dead).await?;
        let settings = serde_json::to_string(&self.settings).unwrap_or_default();
        let runner = uuid::Uuid::now_v7().to_string();
        let action = OperationKind::Redrive;
        let beginning = self
            .letters
            .begin(action, &self.filter, &settings, &runner, extent);
        Ok(Begun {
            operation: beginning.await?,
            runner,
            upto: extent.0,
        })
    }

    async fn work(&self, begun: &Begun, abandoned: &CancellationToken) -> Result<Operation, Error> {
        let (id, runner) = (begun.operation.id, begun.runner.as_str());
        let bulk_runner = BulkRunner {
            bulk: self,
            filter: Filter {
                state: None,
                ..self.filter.clone()
            },
            letters: &self.letters,
            id,
            runner,
            upto: begun.upto,
            abandoned,
        };
        let (state, note) = bulk_runner.all().await?;
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
