//! Moves tasks that have waited for too long to another tier (`promote` in the map), the oldest first.
//!
//! Each rule has a task of its own with its own connection, so that a wave of one tier holds up no other. Every worker
//! that serves the tier of a rule, or the one that it leads to, carries the rule out.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::RowSettings;
use super::look::is_not_migrated;
use crate::Error;
use crate::backlog::{
    Aged, AgingRule, Promoted, add_backlogs, connection, find_aged, notify_of_older, promote,
};
use crate::backoff::Backoff;
use crate::observe::Event;
use crate::postgres::DedicatedConnection;

/// The pauses between two looks at a tier. A look says when the next task will have waited for too long.
const SHORTEST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(5);
/// The pause between two batches: claims and publishes come between them.
const PAUSE: Duration = Duration::from_millis(10);
/// The pause of a process that finds another one at work.
const BESIDE: Duration = Duration::from_secs(1);
/// How soon after a notification the next one follows. Each makes every worker of the tier look.
const NOTIFY_EVERY: Duration = Duration::from_millis(100);
/// How long a step may take.
const LIMIT: Duration = Duration::from_secs(10);

pub(super) async fn run(settings: Arc<RowSettings>, ending: CancellationToken) {
    let rules = settings.aging_rules();
    let promoting = rules.into_iter().map(|rule| {
        let promoter = Promoter {
            connection: connection(&settings.database),
            settings: &settings,
            after: rule.after,
            rule,
            is_prepared: false,
            notified_at: None,
            must_notify: false,
        };
        promoter.run()
    });
    let _: Option<Vec<()>> = ending.run_until_cancelled(join_all(promoting)).await;
}

impl RowSettings {
    /// The rules of the tiers that this worker serves, and those that lead to them.
    fn aging_rules(&self) -> Vec<AgingRule> {
        let topology = &self.consumer.topology;
        let rules = topology.tiers().iter().filter_map(|tier| {
            let rule = tier.promote.as_ref()?;
            let is_served = [&tier.name, &rule.to]
                .into_iter()
                .any(|name| self.tiers.contains_key(name));
            is_served.then(|| {
                Some(AgingRule {
                    priorities: topology.tier(&rule.to)?.priorities_from(tier),
                    from: tier.name.clone(),
                    to: rule.to.clone(),
                    after: rule.after,
                })
            })?
        });
        rules.collect()
    }
}

/// Carries out one rule.
struct Promoter<'a> {
    settings: &'a RowSettings,
    rule: AgingRule,
    /// How long a task waits that was not paused.
    after: Duration,
    connection: DedicatedConnection,
    /// Whether both tiers are known to the database.
    is_prepared: bool,
    notified_at: Option<Instant>,
    /// Whether tasks have moved since the last notification.
    must_notify: bool,
}

impl Promoter<'_> {
    async fn run(mut self) {
        let mut backoff = Backoff::new();
        loop {
            let pause = match self.promote_all().await {
                Ok(pause) => {
                    backoff = Backoff::new();
                    pause
                }
                Err(error) => {
                    self.is_prepared = false;
                    let tier = self.rule.from.as_str();
                    match backoff.is_worth_a_warning() && !is_not_migrated(&error) {
                        true => tracing::warn!(%error, tier, "cannot promote tasks, trying again"),
                        false => {
                            tracing::debug!(%error, tier, "cannot promote tasks, trying again")
                        }
                    }
                    backoff.next().max(SHORTEST)
                }
            };
            sleep(pause).await;
        }
    }

    /// Moves everything that has waited for too long. Returns how long to wait before the next look.
    async fn promote_all(&mut self) -> Result<Duration, Error> {
        self.prepare().await?;
        // Nothing that is paused is promoted.
        let Some(after) = self.settings.waiting_time(&self.rule.from, self.after) else {
            return Ok(SHORTEST);
        };
        self.rule.after = after;
        let Aged { ranks, next } = self.find().await?;
        if ranks.is_empty() {
            let next = next.unwrap_or(self.rule.after);
            return Ok(next.clamp(SHORTEST, LONGEST));
        }
        let mut since = None;
        loop {
            let promoted = self.promote_some(&ranks, since).await?;
            self.tell(&promoted);
            let is_last = !promoted.has_more;
            let is_beside = promoted.count == 0 && promoted.found > 0;
            self.notify(is_last || is_beside).await?;
            if is_last || is_beside {
                return Ok(if is_beside { BESIDE } else { SHORTEST });
            }
            since = promoted.last;
            sleep(PAUSE).await;
        }
    }

    /// Gives the tiers their numbers: one on the broker may have none yet.
    async fn prepare(&mut self) -> Result<(), Error> {
        if self.is_prepared {
            return Ok(());
        }
        let (app, rule) = (self.settings.app(), &self.rule);
        let adding = self
            .connection
            .within(LIMIT, "add tiers", async |connection| {
                add_backlogs(connection, app, &[&rule.from, &rule.to]).await
            });
        adding.await?;
        self.is_prepared = true;
        Ok(())
    }

    async fn find(&mut self) -> Result<Aged, Error> {
        let (app, rule) = (self.settings.app(), &self.rule);
        let finding =
            self.connection
                .within(LIMIT, "look for tasks to promote", async |connection| {
                    find_aged(connection, app, rule).await
                });
        finding.await
    }

    async fn promote_some(
        &mut self,
        ranks: &[i16],
        since: Option<std::time::SystemTime>,
    ) -> Result<Promoted, Error> {
        let (app, rule) = (self.settings.app(), &self.rule);
        let controls = self.settings.consumer.controls.now();
        let paused: Vec<&str> = controls.paused_tasks().collect();
        let promoting = self
            .connection
            .within(LIMIT, "promote tasks", async |connection| {
                promote(connection, app, rule, ranks, since, &paused).await
            });
        promoting.await
    }

    /// Tells observers, and this process's own source of the tier. Its claims begin where rows were last seen, and these
    /// are older.
    fn tell(&mut self, promoted: &Promoted) {
        if promoted.count == 0 {
            return;
        }
        let (from, to, count) = (
            self.rule.from.as_str(),
            self.rule.to.as_str(),
            promoted.count,
        );
        tracing::debug!(
            from,
            to,
            count,
            "promoted tasks that had waited for too long"
        );
        let observers = &self.settings.consumer.observers;
        observers.emit(&Event::Promoted { from, to, count });
        if let Some(signal) = self.settings.signal(to) {
            signal.change(|state| state.found_ready(&promoted.starts));
        }
        self.must_notify = true;
    }

    /// Tells other workers of the tier, now and then and at the end.
    async fn notify(&mut self, is_end: bool) -> Result<(), Error> {
        let is_soon = self
            .notified_at
            .is_some_and(|at| at.elapsed() < NOTIFY_EVERY);
        if !self.must_notify || (is_soon && !is_end) {
            return Ok(());
        }
        let (app, to) = (self.settings.app(), self.rule.to.as_str());
        let notifying = self
            .connection
            .within(LIMIT, "notify workers", async |connection| {
                notify_of_older(connection, app, to).await
            });
        notifying.await?;
        (self.notified_at, self.must_notify) = (Some(Instant::now()), false);
        Ok(())
    }
}
