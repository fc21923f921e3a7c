//! Discarding and purging dead letters.

use super::operation::OperationKind;
use super::{DeadLetters, Filter, Operation, OperationState, State};
use crate::Error;
use crate::error::DeadLetterError;

/// How many rows one statement changes.
const BATCH: i64 = 1_000;

impl DeadLetters {
    /// Marks a dead letter as not needed. The row stays until its retention ends, and can still be
    /// redriven.
    ///
    /// # Errors
    /// [`DeadLetterError::NotFound`]; [`DeadLetterError::Refused`] if its state is not `dead`; as every use
    /// of the database.
    pub async fn discard(&self, id: i64) -> Result<(), Error> {
        if self.discard_rows(&[id]).await? == 1 {
            return Ok(());
        }
        let known = self.get(id).await?;
        Err(Error::DeadLetter(DeadLetterError::Refused {
            id,
            problem: format!(
                "its state is {}, and only dead ones can be discarded",
                known.summary.state
            )
            .into(),
        }))
    }

    /// Marks all dead rows that a filter selects as not needed.
    ///
    /// # Errors
    /// [`DeadLetterError::InvalidFilter`], and as every use of the database.
    pub async fn discard_all(&self, filter: &Filter) -> Result<Operation, Error> {
        let filter = filter.clone().state(State::Dead);
        self.in_batches(OperationKind::Discard, &filter, async |ids| {
            self.discard_rows(ids).await
        })
        .await
    }

    /// Deletes all rows of this app that a filter selects, except those that are being redriven.
    ///
    /// # Errors
    /// [`DeadLetterError::InvalidFilter`], and as every use of the database.
    pub async fn purge(&self, filter: &Filter) -> Result<Operation, Error> {
        self.in_batches(OperationKind::Purge, filter, async |ids| {
            let deleting = sqlx::query(
                "DELETE FROM tierline.dead_letters WHERE id = ANY($1) AND state <> 'redriving'",
            )
            .bind(ids)
            .execute(self.database.pool());
            let deleted = self.within("purge dead letters", deleting).await?;
            Ok(deleted.rows_affected())
        })
        .await
    }

    async fn discard_rows(&self, ids: &[i64]) -> Result<u64, Error> {
        let discarding = sqlx::query(
            "UPDATE tierline.dead_letters SET state = 'discarded', \
             actions = actions || jsonb_build_object( \
                 'at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), \
                 'who', $3::text, 'what', 'discarded', 'why', $4::text) \
             WHERE app = $1 AND id = ANY($2) AND state = 'dead'",
        )
        .bind(self.app())
        .bind(ids)
        .bind(&*self.who)
        .bind(&*self.why)
        .execute(self.database.pool());
        let discarded = self.within("discard dead letters", discarding).await?;
        Ok(discarded.rows_affected())
    }

    /// Changes all rows of a filter in batches, and records the operation.
    async fn in_batches(
        &self,
        action: OperationKind,
        filter: &Filter,
        change: impl AsyncFn(&[i64]) -> Result<u64, Error>,
    ) -> Result<Operation, Error> {
        filter.check()?;
        let runner = uuid::Uuid::now_v7().to_string();
        let extent = self.extent(filter).await?;
        let begun = self.begin(action, filter, "{}", &runner, extent).await?;
        let id = begun.id;
        let unless_ended = EndsWhenDropped(Some((self.clone(), id, runner.clone())));
        let mut after = 0;
        loop {
            let mut query = self.select("SELECT id");
            query.push(" AND id > ").push_bind(after);
            query.push(" AND id <= ").push_bind(extent.0);
            filter.push(&mut query);
            query.push(" ORDER BY id LIMIT ").push_bind(BATCH);
            let reading = query.build_query_scalar().fetch_all(self.database.pool());
            let ids: Vec<i64> = self.within("list dead letters", reading).await?;
            let Some(last) = ids.last() else { break };
            after = *last;
            let changed = change(&ids).await?;
            if !self.report(id, &runner, (changed, 0, 0)).await? {
                let stopped = self.end(id, &runner, OperationState::Stopped, "").await;
                unless_ended.disarm();
                return stopped;
            }
        }
        let done = self.end(id, &runner, OperationState::Done, "").await;
        unless_ended.disarm();
        done
    }

    /// The last row that a filter selects, and how many it selects.
    pub(super) async fn extent(&self, filter: &Filter) -> Result<(i64, u64), Error> {
        let mut query = self.select("SELECT coalesce(max(id), 0), count(*)");
        filter.push(&mut query);
        let reading = query.build_query_as().fetch_one(self.database.pool());
        let (upto, count): (i64, i64) = self.within("count dead letters", reading).await?;
        Ok((upto, count.unsigned_abs()))
    }
}

/// Records the end of an operation whose future is dropped or fails. Nobody resumes it, so it would stay
/// `running` for ever.
struct EndsWhenDropped(Option<(DeadLetters, i64, String)>);

impl EndsWhenDropped {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for EndsWhenDropped {
    fn drop(&mut self) {
        let runtime = tokio::runtime::Handle::try_current();
        let (Some((letters, id, runner)), Ok(runtime)) = (self.0.take(), runtime) else {
            return;
        };
        runtime.spawn(async move {
            let stopped = OperationState::Stopped;
            let ending = letters.end(id, &runner, stopped, "it ended before its last row");
            if let Err(error) = ending.await {
                tracing::debug!(%error, id, "cannot record the end of an operation; its state stays running");
            }
        });
    }
}
