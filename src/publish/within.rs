//! Publishes tasks within a transaction of the caller: as rows of their tiers, on the caller's connection.

use std::time::SystemTime;

use tokio::time::Instant;

use super::outcome::Call;
use super::rows::{confirmed, insert_error, key_error};
use super::{ASSUMED_VERSION, DEFAULT_DEADLINE, Inner, deadline};
use crate::Error;
use crate::backlog::{KeyedInsert, NewRow, RowWriters};
use crate::error::DatabaseError;
use crate::message::Message;
use crate::route::RouteRequest;
use crate::task::{PublishRequest, Receipt};

const TRIED: &str = "publish within a transaction";

impl Inner {
    pub(super) async fn publish_within(
        &self,
        mut request: PublishRequest,
        connection: &mut sqlx::PgConnection,
    ) -> Result<Receipt, Error> {
        let _under_way = self.begin(|| TRIED.to_owned())?;
        let writers = self.writers()?;
        let begin = Instant::now();
        let deadline = deadline(&request, begin);
        let announced = self.announce(&request, begin);
        let call = self.call(&mut request, begin);
        self.controls.wait_until_known(deadline).await;
        let prepared = self.row(request, SystemTime::now());
        let (row, receipt) = self.refused(announced, prepared)?;
        let rows = std::slice::from_ref(&row);
        let inserted = writers.insert_within(connection, rows, deadline).await;
        let mut inserted = inserted.map_err(|failure| {
            let error = insert_error(receipt.id.clone(), &row, failure);
            self.emit_failed(&row.task, call.clone(), &receipt.id, &row.tier, &error);
            error
        })?;
        match inserted.pop() {
            Some(became) => self.outcome(became, receipt, &row, call),
            None => Ok(receipt),
        }
    }

    /// Every request is checked before the first statement is sent.
    pub(super) async fn publish_many_within(
        &self,
        requests: impl IntoIterator<Item = PublishRequest>,
        connection: &mut sqlx::PgConnection,
    ) -> Result<Vec<Receipt>, Error> {
        let _under_way = self.begin(|| TRIED.to_owned())?;
        let writers = self.writers()?;
        self.controls
            .wait_until_known(Instant::now() + DEFAULT_DEADLINE)
            .await;
        let (now, begin) = (SystemTime::now(), Instant::now());
        let (mut latest, mut refused) = (None, None);
        let (mut rows, mut each) = (Vec::new(), Vec::new());
        let mut requests = requests.into_iter();
        for mut request in &mut requests {
            latest = latest.max(Some(deadline(&request, begin)));
            let announced = self.announce(&request, begin);
            let call = self.call(&mut request, begin);
            match self.row(request, now) {
                Ok((row, receipt)) => {
                    rows.push(row);
                    each.push((receipt, call));
                }
                Err(error) => {
                    refused = Some((announced, error));
                    break;
                }
            }
        }
        if let Some((announced, error)) = refused {
            // None of them is published.
            self.none_stored(&rows, &each, &error);
            let others = requests.map(|request| self.announce(&request, begin));
            for announced in [announced].into_iter().chain(others).flatten() {
                self.emit_refused(&announced, &error);
            }
            return Err(error);
        }
        let (Some(deadline), Some(row), Some((receipt, _))) = (latest, rows.first(), each.first())
        else {
            return Ok(Vec::new());
        };
        let inserted = writers.insert_within(connection, &rows, deadline).await;
        // The first task stands for all: either all are stored or none.
        let inserted = inserted.map_err(|failure| {
            let error = insert_error(receipt.id.clone(), row, failure);
            self.none_stored(&rows, &each, &error);
            error
        })?;
        let each = inserted.into_iter().zip(each).zip(&rows);
        // Each has an event, also those after the first that has failed.
        let each =
            each.map(|((became, (receipt, call)), row)| self.outcome(became, receipt, row, call));
        let outcomes: Vec<_> = each.collect();
        outcomes.into_iter().collect()
    }

    /// Emits the failure of tasks that are stored together or not at all.
    fn none_stored(&self, rows: &[NewRow], each: &[(Receipt, Call)], error: &Error) {
        for (row, (receipt, call)) in rows.iter().zip(each) {
            self.emit_failed(&row.task, call.clone(), &receipt.id, &row.tier, error);
        }
    }

    fn writers(&self) -> Result<&RowWriters, Error> {
        self.rows.as_ref().ok_or_else(|| {
            let tried = TRIED.into();
            Error::Database(DatabaseError::NotConfigured { tried })
        })
    }

    /// The row that a request becomes, in whatever tier, and its receipt.
    fn row(&self, request: PublishRequest, now: SystemTime) -> Result<(NewRow, Receipt), Error> {
        let route_request = RouteRequest::Publish {
            priority: request.priority,
            is_row: true,
        };
        let route = self.destination(&request, route_request, ASSUMED_VERSION)?;
        let after = request.delay.unwrap_or_default();
        let claim = request.key_claim()?;
        let is_id_drawn = request.id.is_none();
        let mut message = Message::first(request, &route.tier, route.priority, now);
        message.priority = route.priority;
        message.check()?;
        let receipt = Receipt::new(message.id.clone(), route.tier, now);
        let row = NewRow::first(&mut message, is_id_drawn, claim, after);
        Ok((row, receipt))
    }

    /// What the publish of a row is told, where `receipt` is that of a row that was stored.
    fn outcome(
        &self,
        became: KeyedInsert,
        receipt: Receipt,
        row: &NewRow,
        call: Call,
    ) -> Result<Receipt, Error> {
        let stored = match became {
            Ok(inserted) => confirmed(row, inserted),
            Err(problem) => Err(Error::Publish(key_error(receipt.id.clone(), row, problem))),
        };
        match stored {
            Ok(stored) => {
                let receipt = stored.receipt(receipt);
                self.emit_stored(&row.task, call, &receipt);
                Ok(receipt)
            }
            Err(error) => {
                self.emit_failed(&row.task, call, &receipt.id, &row.tier, &error);
                Err(error)
            }
        }
    }
}
