//! Runs a bulk redrive: claims, publishes and marks rows, batch by batch.

use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::bulk::{BulkRedrive, Canary};
use super::redrive::{Claimed, Sent};
use super::{DeadLetters, Filter, OperationState};
use crate::Error;
use crate::postgres::Time;

/// How many rows one statement claims, unless they are too large.
const BATCH: u32 = 1_000;
/// How often the runner reads the outcomes of a canary.
const LOOK_EVERY: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(30 * 86_400);
/// The note of an operation whose caller dropped the future.
const ABANDONED: &str = "its caller went away";

/// One run of a redrive, from its beginning or from the row at which an earlier run stopped.
pub(super) struct BulkRunner<'a> {
    pub(super) bulk: &'a BulkRedrive,
    /// Selects rows in any state.
    pub(super) filter: Filter,
    pub(super) letters: &'a DeadLetters,
    pub(super) id: i64,
    /// Identifies this run: its claims and counts carry this text.
    pub(super) runner: &'a str,
    pub(super) upto: i64,
    /// Cancelled when the caller drops its future. The run then ends after its batch.
    pub(super) abandoned: &'a CancellationToken,
}

/// The state in which a run ended, and a note for the operator.
pub(super) type RunResult = (OperationState, String);

/// The result of a batch.
struct Batch {
    confirmed: Vec<i64>,
    /// Whether the redrive may continue.
    goes_on: bool,
    problem: Option<Error>,
}

impl BulkRunner<'_> {
    pub(super) async fn all(&self) -> Result<RunResult, Error> {
        let mut after = None;
        if let Some(canary) = &self.bulk.settings.canary
            && let Some(ended) = self.canary(canary, &mut after).await?
        {
            return Ok(ended);
        }
        let begin = Instant::now();
        let mut count: u32 = 0;
        let mut claimed = self.claim(self.batch_size(), &mut after).await?;
        let mut sent = Vec::new();
        // While one batch is being published, the one before is marked and the next one claimed.
        while !claimed.is_empty() {
            count = count.saturating_add(u32::try_from(claimed.len()).unwrap_or(u32::MAX));
            let (settled, sending, claiming) = tokio::join!(
                self.settle(sent),
                self.publish(claimed, begin, count),
                self.claim(self.batch_size(), &mut after),
            );
            // Published rows are marked even if other rows failed.
            sent = sending?;
            let ended = settled.map(|batch| batch.ended().or_else(|| self.ended_early()));
            let (ended, next) = match (ended, claiming) {
                (Ok(None), Ok(next)) => {
                    claimed = next;
                    continue;
                }
                ended => ended,
            };
            self.settle(sent).await?;
            let ids: Vec<i64> = next?.iter().map(|claimed| claimed.id).collect();
            self.letters.give_back(self.runner, &ids).await?;
            return ended.map(|ended| ended.unwrap_or((OperationState::Stopped, String::new())));
        }
        match self.settle(sent).await?.ended() {
            Some(ended) => Ok(ended),
            None => self.finish().await,
        }
    }

    /// Publishes a batch, and then waits until the rate allows `count` rows in all.
    async fn publish(
        &self,
        claimed: Vec<Claimed>,
        begin: Instant,
        count: u32,
    ) -> Result<Vec<(i64, Sent)>, Error> {
        let sent = self.letters.send(claimed).await?;
        if let Some(rate) = self.bulk.settings.rate {
            let due = begin + Duration::from_secs_f64(f64::from(count) / f64::from(rate));
            self.abandoned.run_until_cancelled(sleep_until(due)).await;
        }
        Ok(sent)
    }

    /// The result of the run if its caller has gone away.
    fn ended_early(&self) -> Option<RunResult> {
        let is_abandoned = self.abandoned.is_cancelled();
        is_abandoned.then(|| (OperationState::Stopped, ABANDONED.to_owned()))
    }

    fn batch_size(&self) -> u32 {
        // A tenth of a second at a time, so that a low rate is even and a stop is quick.
        let of_rate = self.bulk.settings.rate.map(|rate| (rate / 10).max(1));
        of_rate.unwrap_or(BATCH).min(BATCH)
    }

    /// Redrives the first rows and waits until it is clear whether enough of them succeed. `None`: enough
    /// did.
    async fn canary(
        &self,
        canary: &Canary,
        after: &mut Option<(Time, i64)>,
    ) -> Result<Option<RunResult>, Error> {
        let mut confirmed = Vec::new();
        let mut left = canary.count;
        // Large rows come in several batches.
        while left > 0 {
            let claimed = self.claim(left, after).await?;
            if claimed.is_empty() {
                break;
            }
            left = left.saturating_sub(u32::try_from(claimed.len()).unwrap_or(u32::MAX));
            let sent = self.letters.send(claimed).await?;
            let batch = self.settle(sent).await?;
            let ended = batch.ended().or_else(|| self.ended_early());
            confirmed.extend(batch.confirmed);
            if ended.is_some() {
                return Ok(ended);
            }
        }
        let count = confirmed.len();
        let stopped = |note: String| Ok(Some((OperationState::Stopped, note)));
        match (count, canary.count - left) {
            (0, 0) => return Ok(None),
            (0, refused) => {
                return stopped(format!(
                    "the canary is inconclusive: none of its {refused} rows could be published"
                ));
            }
            _ => {}
        }
        // At least one: a canary of none would prove nothing.
        let needed = ((count as f64 * canary.success).ceil() as usize).max(1);
        // An unlimited wait would overflow the clock.
        let deadline = Instant::now() + canary.wait.min(LONGEST_WAIT);
        loop {
            let (well, badly) = self.outcomes(&confirmed).await?;
            if well >= needed {
                return Ok(None);
            }
            if badly > count - needed {
                return stopped(format!(
                    "the canary failed: {badly} of {count} failed again, and {needed} had to succeed"
                ));
            }
            if Instant::now() >= deadline {
                return stopped(format!(
                    "the canary is inconclusive: {well} of {count} succeeded in time, and {needed} had to succeed"
                ));
            }
            if !self.letters.report(self.id, self.runner, (0, 0, 0)).await? {
                return stopped(String::new());
            }
            if let Some(ended) = self.ended_early() {
                return Ok(Some(ended));
            }
            let waiting = sleep(LOOK_EVERY);
            self.abandoned.run_until_cancelled(waiting).await;
        }
    }

    /// How many of these rows succeeded, and how many failed.
    async fn outcomes(&self, ids: &[i64]) -> Result<(usize, usize), Error> {
        let reading = sqlx::query_as(
            "SELECT count(*) FILTER (WHERE outcome IN ('done', 'discarded')), \
             count(*) FILTER (WHERE outcome IN ('dead', 'expired')) \
             FROM tierline.dead_letters WHERE id = ANY($1)",
        )
        .bind(ids)
        .fetch_one(self.letters.database.pool());
        let (well, badly): (i64, i64) =
            self.letters.within("read canary outcomes", reading).await?;
        Ok((well as usize, badly as usize))
    }

    /// Claims the next rows: first the dead ones, then those whose claim is older than the lease.
    async fn claim(
        &self,
        most: u32,
        after: &mut Option<(Time, i64)>,
    ) -> Result<Vec<Claimed>, Error> {
        let claimed = self.claim_where("dead", most, *after).await?;
        // Postgres returns them in no order.
        let last = claimed.iter().map(|row| (row.died_at, row.id)).max();
        *after = last.or(*after);
        match claimed.is_empty() {
            true => self.claim_where("redriving", most, None).await,
            false => Ok(claimed),
        }
    }

    async fn claim_where(
        &self,
        state: &str,
        most: u32,
        after: Option<(Time, i64)>,
    ) -> Result<Vec<Claimed>, Error> {
        let mut query = self.letters.claim(self.runner);
        match state {
            "dead" => query.push(" AND state = 'dead'"),
            _ => {
                query.push(" AND (false");
                self.letters.push_stale(&mut query);
                // A bulk redrive leaves out rows that were discarded before they were claimed.
                query.push(") AND coalesce(claimed_from, 'dead') = 'dead' AND claim <> ");
                query.push_bind(self.runner)
            }
        };
        query.push(" AND id <= ").push_bind(self.upto);
        self.filter.push(&mut query);
        query.push(" AND (task IS NULL OR task = ANY(");
        query.push_bind(self.mapped()).push("))");
        if let Some((died_at, id)) = after {
            query.push(" AND (died_at, id) > (");
            query.push_bind(died_at).push(", ");
            query.push_bind(id).push(")");
        }
        query
            .push(" ORDER BY died_at, id LIMIT ")
            .push_bind(i64::from(most));
        self.letters.claimed(query).await
    }

    fn mapped(&self) -> Vec<String> {
        let tasks = self.letters.topology.tasks().iter();
        tasks.map(|task| task.name.clone()).collect()
    }

    /// Marks confirmed rows, releases the others, and reports progress.
    async fn settle(&self, sent: Vec<(i64, Sent)>) -> Result<Batch, Error> {
        let (mut confirmed, mut others) = (Vec::new(), Vec::new());
        let (mut failed, mut refused, mut problem) = (0, 0, None);
        for (id, sent) in sent {
            match sent {
                Sent::Confirmed => confirmed.push(id),
                Sent::Refused(error) => {
                    tracing::warn!(%error, "a dead letter cannot be redriven");
                    refused += 1;
                    others.push(id);
                }
                Sent::Failed(error) => {
                    failed += 1;
                    others.push(id);
                    problem = Some(error);
                }
            }
        }
        if !confirmed.is_empty() {
            self.letters.mark_published(self.runner, &confirmed).await?;
        }
        if !others.is_empty() {
            self.letters.give_back(self.runner, &others).await?;
        }
        let counts = (confirmed.len() as u64, failed, refused);
        // Reported even if empty, so that a stop takes effect without another batch.
        let goes_on = self.letters.report(self.id, self.runner, counts).await?;
        if self.bulk.progress.is_some() {
            self.bulk.tell(&self.letters.operation(self.id).await?);
        }
        Ok(Batch {
            confirmed,
            goes_on,
            problem,
        })
    }

    /// Counts the rows whose task is not in the map, and those that another process is redriving.
    async fn finish(&self) -> Result<RunResult, Error> {
        let mut query = self.letters.select(
            "SELECT count(*) FILTER (WHERE state = 'dead'), count(*) FILTER (WHERE state = 'redriving')",
        );
        query.push(" AND id <= ").push_bind(self.upto);
        query.push(" AND (state = 'redriving' OR state = 'dead' AND NOT task = ANY(");
        query.push_bind(self.mapped()).push("))");
        self.filter.push(&mut query);
        let pool = self.letters.database.pool();
        let reading = query.build_query_as().fetch_one(pool);
        let (unmapped, elsewhere): (i64, i64) = self
            .letters
            .within("count the remaining rows", reading)
            .await?;
        let counts = (0, 0, unmapped.unsigned_abs());
        self.letters.report(self.id, self.runner, counts).await?;
        let mut note = Vec::new();
        if unmapped > 0 {
            note.push(format!(
                "the map has no tier for the tasks of {unmapped} rows"
            ));
        }
        if elsewhere > 0 {
            note.push(format!("another process is redriving {elsewhere} rows"));
        }
        Ok((OperationState::Done, note.join("; ")))
    }
}

impl Batch {
    /// The result of the run, if this batch was its last.
    fn ended(&self) -> Option<RunResult> {
        match &self.problem {
            // The broker accepts nothing for now, so the remaining rows would fail too.
            Some(problem) if self.confirmed.is_empty() => {
                Some((OperationState::Stopped, problem.to_string()))
            }
            _ if !self.goes_on => Some((OperationState::Stopped, String::new())),
            _ => None,
        }
    }
}
