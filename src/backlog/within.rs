//! Inserts rows within a transaction of the caller.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::commits::CommitWatcher;
use super::insert::insert_rows;
use super::keys::{Inserted, KEY_ATTEMPT, KeyProblem, KeyedInsert, KeyedRow, Wait, insert_keyed};
use super::row::NewRow;
use super::writer::{
    BATCH_BYTES, BATCH_ROWS, InsertFailure, KEYED_ROWS, RowWriters, failure, is_of_unknown_tier,
    unsent_because,
};
use crate::postgres::PgConnection;

/// The pause before a key that is busy is tried again. It doubles up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

const TRIED: &str = "publish within a transaction";
const FOREIGN: &str = "the transaction's database lacks tables of this release of tierline; begin it on the app's own database, or run \
     `tierline migrate`";
/// sqlx sends a statement in two steps, which outside of a transaction may reach two server connections.
const NO_TRANSACTION: &str =
    "behind a transaction pooler it needs a transaction, begun with sqlx's begin()";

impl RowWriters {
    /// Inserts rows on a connection of the caller's, within its transaction. Workers are told of them when it has
    /// committed. Returns what became of each, in order: one whose key is not to be had fails no other, and does not abort
    /// the transaction.
    pub(crate) async fn insert_within(
        &self,
        connection: &mut sqlx::PgConnection,
        rows: &[NewRow],
        deadline: Instant,
    ) -> Result<Vec<KeyedInsert>, InsertFailure> {
        let inserting = async {
            let mut connection = PgConnection::of_caller(connection, self.database.pool());
            if self.database.is_behind_pooler() && !connection.is_in_sqlx_transaction() {
                return Err(InsertFailure::Refused(NO_TRANSACTION.into()));
            }
            self.prepare().await.map_err(unsent_because)?;
            let full = self.full_tiers(&mut connection, rows).await?;
            let mut inserted = Vec::with_capacity(rows.len());
            let mut rest = rows;
            while !rest.is_empty() {
                let batch = first_batch(rest);
                let became = self.insert_batch_within(&mut connection, &batch, &full, deadline);
                inserted.extend(became.await?);
                rest = &rest[batch.len()..];
            }
            Ok(inserted)
        };
        match timeout_at(deadline, inserting).await {
            Ok(inserted) => inserted,
            Err(_) => {
                let why = "the database did not answer in time; roll the transaction back, which stores nothing";
                Err(InsertFailure::Lost(why.into()))
            }
        }
    }

    /// The tiers that have no room for their rows with keys: these may still be duplicates. A tier that has no room for all
    /// others refuses them before the first is inserted: else a part would be in the caller's transaction.
    async fn full_tiers<'r>(
        &self,
        connection: &mut PgConnection<'_>,
        rows: &'r [NewRow],
    ) -> Result<BTreeSet<&'r str>, InsertFailure> {
        let mut counts: BTreeMap<(&str, bool), usize> = BTreeMap::new();
        for row in rows {
            *counts.entry((&row.tier, row.key.is_some())).or_default() += 1;
        }
        let mut full = BTreeSet::new();
        for ((name, has_keys), count) in counts {
            let Some(tier) = self.tiers.get(name) else {
                return Err(InsertFailure::Refused("its tier is not in the map".into()));
            };
            let Some(room) = &tier.room else {
                continue;
            };
            let admitting = room.admit_all(connection, (&self.app, name), count).await;
            match admitting.map_err(|error| self.failed_within(error))? {
                Ok(()) => {}
                Err(InsertFailure::Full) if has_keys => {
                    full.insert(name);
                }
                Err(failure) => return Err(failure),
            }
        }
        Ok(full)
    }

    /// A statement of the caller's transaction failed: nothing of the transaction is stored, whatever the error.
    fn failed_within(&self, error: sqlx::Error) -> InsertFailure {
        if is_of_unknown_tier(&error) {
            self.prepare_again();
            let why = "the database did not know its tier when the transaction began; run the transaction again";
            return InsertFailure::NotSent(why.into());
        }
        match failure(self.database.failed(TRIED, error)) {
            InsertFailure::Lost(cause) => InsertFailure::NotSent(cause),
            InsertFailure::NotMigrated(_) => InsertFailure::Refused(FOREIGN.into()),
            failure => failure,
        }
    }

    async fn insert_batch_within(
        &self,
        connection: &mut PgConnection<'_>,
        batch: &[&NewRow],
        full: &BTreeSet<&str>,
        deadline: Instant,
    ) -> Result<Vec<KeyedInsert>, InsertFailure> {
        let failed = |error| self.failed_within(error);
        let Some(first) = batch.first() else {
            return Ok(Vec::new());
        };
        let of = (&*self.app, first.tier.as_str());
        let has_room = !full.contains(first.tier.as_str());
        let keyed = batch.iter();
        let keyed: Vec<KeyedRow<'_>> = keyed
            .filter_map(|row| KeyedRow::of(row, has_room))
            .collect();
        let (inserted, transaction) = match keyed.is_empty() {
            true => {
                let transaction = insert_rows(connection, of, batch).await.map_err(failed)?;
                (vec![Ok(Inserted::New); batch.len()], Some(transaction))
            }
            false => self
                .insert_keyed_within(connection, of, &keyed, deadline)
                .await
                .map_err(failed)?,
        };
        if let Some(transaction) = transaction.filter(|_| !self.database.is_behind_pooler()) {
            let watch = || CommitWatcher::start(&self.database, &self.app);
            let commits = self.commits.get_or_init(watch);
            let after = batch.iter().map(|row| row.after).min().unwrap_or_default();
            commits.watch(transaction, &first.tier, after);
        }
        Ok(inserted)
    }

    /// Tries keys that are busy again until the deadline. Also returns the number of the transaction, if it has written
    /// anything.
    async fn insert_keyed_within(
        &self,
        connection: &mut PgConnection<'_>,
        of: (&str, &str),
        keyed: &[KeyedRow<'_>],
        deadline: Instant,
    ) -> Result<(Vec<KeyedInsert>, Option<i64>), sqlx::Error> {
        let keeping: Vec<&str> = self.keeping.iter().map(String::as_str).collect();
        let mut inserted: Vec<KeyedInsert> = vec![Err(KeyProblem::Busy); keyed.len()];
        let mut transaction = None;
        let mut pause = FIRST_PAUSE;
        loop {
            let busy: Vec<usize> = (0..keyed.len())
                .filter(|index| inserted[*index] == Err(KeyProblem::Busy))
                .collect();
            let rows: Vec<_> = busy.iter().map(|index| keyed[*index]).collect();
            let answer = insert_keyed(connection, of, Wait::Within, &keeping, &rows).await?;
            transaction = answer.transaction.or(transaction);
            for (index, became) in busy.into_iter().zip(answer.inserted) {
                inserted[index] = became;
            }
            let is_any_busy = inserted.contains(&Err(KeyProblem::Busy));
            if !is_any_busy || Instant::now() + pause + KEY_ATTEMPT >= deadline {
                return Ok((inserted, transaction));
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// The first rows that one statement inserts: of one tier, and all ready, all due later, or all with keys.
fn first_batch(rows: &[NewRow]) -> Vec<&NewRow> {
    let kind = |row: &NewRow| (row.key.is_some(), row.key.is_none() && row.after.is_zero());
    let Some(first) = rows.first() else {
        return Vec::new();
    };
    let most = match first.key {
        None => BATCH_ROWS,
        Some(_) => KEYED_ROWS,
    };
    let is_alike = |row: &&NewRow| row.tier == first.tier && kind(row) == kind(first);
    let mut bytes = 0;
    let fits = |row: &&NewRow| {
        let fits = bytes < BATCH_BYTES;
        bytes += row.size();
        fits
    };
    let batch = rows.iter().take(most).take_while(is_alike);
    batch.take_while(fits).collect()
}
