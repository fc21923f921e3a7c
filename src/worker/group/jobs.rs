//! The jobs of a group: begun, adopted by a delivery of a later channel, ended, and dropped.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::Group;
use crate::worker::gate::Pass;
use crate::worker::job::{self, End, JobId, Kind, News};
use crate::worker::settle::Package;
use crate::worker::tier::Held;

/// How long handlers may take to be dropped before their messages go back to the broker. One that does
/// not yield cannot be dropped.
const DROP_LIMIT: Duration = Duration::from_secs(5);

/// A job in a slot. The delivery that it settles changes where its channel is lost and the message
/// comes again.
pub(super) struct Running {
    pub(super) tier: usize,
    pub(super) generation: u64,
    tag: u64,
    pub(super) package: Arc<Package>,
    /// The right to run; none where no handler runs.
    _pass: Option<Pass>,
    /// The job itself, which is dropped with this.
    job: AbortOnDropHandle<()>,
}

impl Group {
    pub(super) fn start(&mut self, tier: usize, held: Held, kind: Kind, pass: Option<Pass>) {
        let delivery = (tier, self.tiers[tier].generation, held.tag);
        self.begin(delivery, held.package, kind, pass);
    }

    fn begin(
        &mut self,
        (tier, generation, tag): (usize, u64, u64),
        package: Arc<Package>,
        kind: Kind,
        pass: Option<Pass>,
    ) {
        let id = self.next_job;
        self.next_job += 1;
        let shop = self.shop.clone();
        let job = job::start(shop, package.clone(), id, kind, self.sender.clone());
        let running = Running {
            tier,
            generation,
            tag,
            package,
            _pass: pass,
            job,
        };
        self.running.insert(id, running);
    }

    pub(super) fn hear(&mut self, news: News) {
        match news {
            News::Ended(job, end) => self.ended(job, end),
            News::Hung(job, since) => self.hung(job, since),
        }
    }

    fn ended(&mut self, job: JobId, end: End) {
        // A hung job that ends after all is not known any more.
        let Some(running) = self.running.remove(&job) else {
            return;
        };
        let (generation, tag, package) = (running.generation, running.tag, &running.package);
        let tier = &mut self.tiers[running.tier];
        match end {
            End::Completed => tier.completed(generation, tag, package),
            End::Succeeded => tier.succeeded(generation, tag, package),
            End::Back => tier.give_back(generation, tag, package),
            End::StillSuspect => drop(tier.refuse(generation, tag)),
        }
    }

    /// A job cannot be stopped: its slot goes on without it, and its message is buried by another. Should
    /// it yield after all, it is dropped then.
    fn hung(&mut self, job: JobId, since: Duration) {
        let Some(running) = self.running.remove(&job) else {
            return;
        };
        let delivery = (running.tier, running.generation, running.tag);
        let package = running.package.clone();
        self.begin(delivery, package, Kind::Hung(since), None);
    }

    /// Drops what runs, at its next `await`.
    pub(super) fn abort_all(&self) {
        self.running
            .values()
            .for_each(|running| running.job.abort());
    }
}

/// Gives a delivery, of this generation, to a job of the tier that was begun on an earlier channel and
/// works on the same message; whether there is one. Each delivery is given to one job: of equal messages
/// each needs its own acknowledgement.
pub(super) fn adopt(
    running: &mut HashMap<JobId, Running>,
    tier: usize,
    generation: u64,
    package: &Package,
    tag: u64,
) -> bool {
    let orphan = running.values_mut().find(|job| {
        job.tier == tier && job.generation != generation && job.package.is_same(package)
    });
    if let Some(orphan) = orphan {
        orphan.generation = generation;
        orphan.tag = tag;
        return true;
    }
    false
}

impl Drop for Group {
    /// Drops all handlers, and only then the channels: the messages must not be run by somebody else
    /// before.
    fn drop(&mut self) {
        let running = std::mem::take(&mut self.running);
        let runtime = Handle::try_current();
        let (false, Ok(runtime)) = (running.is_empty(), runtime) else {
            return;
        };
        let channels = (std::mem::take(&mut self.tiers), self.connection.take());
        runtime.spawn(async move {
            let ending = running.into_values().map(|running| {
                running.job.abort();
                // With its right to run, which others wait for.
                async move { drop((running.job.await, running._pass)) }
            });
            let _ = timeout(DROP_LIMIT, join_all(ending)).await;
            drop(channels);
        });
    }
}
