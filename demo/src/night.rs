//! One night at the hotel: the load arrives, the groups work, the provider fails and returns, and its
//! dead letters are redriven, until every task has ended.

use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, stream};
use tierline::backlog::TaskFilter;
use tierline::dead::{
    Canary, DeadLetters, FailureGroup, Filter, OperationState, Page, RootCause, State, Summary,
};
use tierline::{TaskId, Tierline, Topology};
use tierline_testbed::Vhost;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{sleep, sleep_until, timeout};

use crate::handlers::Hotel;
use crate::ledger::{Audit, Fate};
use crate::load::{Happening, Order, Scene};
use crate::meter::Figures;
use crate::pace::Pace;
use crate::tasks;
use crate::view::{Screen, Sight};

/// How often the operator looks at the log of dead letters.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How many groups of dead letters the operator reads.
const GROUPS: u16 = 100;
/// How many rows of tiers in Postgres are counted at once.
const PAGE: u16 = 500;
/// How long to wait for a canary.
const CANARY_WAIT: Duration = Duration::from_secs(20);

/// The inputs of a night.
pub(crate) struct Setting<'a> {
    pub(crate) title: &'a str,
    /// The map by which tasks are published and worked.
    pub(crate) map: Topology,
    /// The map by which they are counted.
    pub(crate) hotel: &'a Topology,
    pub(crate) pace: Pace,
    pub(crate) scenes: Vec<Scene>,
    pub(crate) screen: &'a Screen,
}

/// The result of a night.
pub(crate) struct Ending {
    pub(crate) title: String,
    pub(crate) took: Duration,
    pub(crate) figures: Vec<Figures>,
    pub(crate) audit: Audit,
    pub(crate) dead: Vec<Summary>,
    /// Publishes that ended in an error, for which nothing is guaranteed.
    pub(crate) refused: usize,
    pub(crate) left: Left,
}

/// What has not ended when the night is over.
pub(crate) enum Left {
    /// Messages on the broker.
    InQueues { messages: u32, queues: usize },
    /// Rows in Postgres.
    InTables { rows: usize },
}

/// Runs a night on its own database, and its own virtual host if the map has tiers on the broker. Both are always
/// removed.
pub(crate) async fn play(setting: Setting<'_>) -> Result<Ending> {
    let vhost = match setting.map.broker_tiers().next() {
        Some(_) => Some(tierline_testbed::vhost().await),
        None => None,
    };
    let database = tierline_testbed::database().await;
    let hotel = Hotel::new(setting.hotel, setting.pace);
    let meter = hotel.meter.clone();
    let mut builder = Tierline::builder(setting.map);
    if let Some(vhost) = &vhost {
        builder = builder.amqp(vhost.amqp_url());
    }
    let app = builder
        .postgres(database.url())
        .registry(tasks::registry(setting.pace)?)
        .data(hotel.clone())
        .observe(move |event| meter.handle(event))
        .version(env!("CARGO_PKG_VERSION"))
        .connect()
        .await?;
    app.database()?.migrate().await?;
    let night = Night {
        title: setting.title,
        letters: app.dead_letters()?.by("the night porter"),
        app,
        hotel,
        screen: setting.screen,
        begin: Instant::now(),
        provider_returned: Notify::new(),
        is_told: AtomicBool::new(false),
    };
    let refused = night.work_through(setting.scenes).await?;
    let took = night.begin.elapsed();
    let dead = night.dead_letters().await?;
    let left = match &vhost {
        Some(vhost) => left_in_queues(vhost).await?,
        None => night.left_in_tables().await?,
    };
    Ok(Ending {
        title: setting.title.to_owned(),
        took,
        figures: night.hotel.meter.figures(),
        audit: night.audit(&dead),
        dead,
        refused,
        left,
    })
}

async fn left_in_queues(vhost: &Vhost) -> Result<Left> {
    let queues = vhost.queues().await?;
    Ok(Left::InQueues {
        messages: queues.iter().map(|queue| queue.depth).sum(),
        queues: queues.len(),
    })
}

struct Night<'a> {
    title: &'a str,
    app: Tierline,
    letters: DeadLetters,
    hotel: Hotel,
    screen: &'a Screen,
    begin: Instant,
    provider_returned: Notify,
    /// Whether all events have happened.
    is_told: AtomicBool,
}

impl Night<'_> {
    /// Runs all groups until every task has ended. Returns how many publishes were refused.
    async fn work_through(&self, scenes: Vec<Scene>) -> Result<usize> {
        let groups = self.app.topology().groups().iter();
        let groups: Vec<_> = groups.map(|group| group.name.clone()).collect();
        let (stop, stopped) = oneshot::channel::<()>();
        let worker = self.app.work(groups).grace(Duration::from_secs(5));
        let working = async {
            let stopped = async { _ = stopped.await };
            worker.until(stopped).await.context("the worker failed")
        };
        let living = async {
            let limit = self.hotel.pace.limit();
            let lived = tokio::select! {
                lived = timeout(limit, self.live(scenes)) => lived,
                shown = self.show() => return shown.map(|()| 0),
            };
            self.draw()?;
            drop(stop);
            match lived {
                Ok(refused) => refused,
                Err(_) => bail!("the night did not end within {limit:?}: {}", self.open()),
            }
        };
        let ((), refused) = tokio::try_join!(working, living)?;
        Ok(refused)
    }

    async fn live(&self, scenes: Vec<Scene>) -> Result<usize> {
        let (refused, ()) = tokio::try_join!(self.play(scenes), self.operate())?;
        Ok(refused)
    }

    /// Plays the events at their times.
    async fn play(&self, scenes: Vec<Scene>) -> Result<usize> {
        let (orders, ordered) = mpsc::unbounded_channel();
        let telling = async move {
            for scene in scenes {
                sleep_until((self.begin + scene.at).into()).await;
                if let Some(message) = &scene.message {
                    self.print(message)?;
                }
                match scene.happening {
                    Happening::Orders(of_scene) => {
                        of_scene
                            .into_iter()
                            .try_for_each(|order| orders.send(order))?;
                    }
                    Happening::ProviderFails => self.hotel.provider.set_down(true),
                    Happening::ProviderReturns => {
                        self.hotel.provider.set_down(false);
                        self.provider_returned.notify_one();
                    }
                }
            }
            Ok(())
        };
        let ((), refused) = tokio::try_join!(telling, self.publish(ordered))?;
        self.is_told.store(true, Ordering::Relaxed);
        self.print("no more tasks arrive; the backlog is worked off")?;
        Ok(refused)
    }

    /// Publishes tasks without waiting for each confirm. Returns how
    /// many were refused.
    async fn publish(&self, ordered: mpsc::UnboundedReceiver<Order>) -> Result<usize> {
        let tasks = RefCell::new(VecDeque::new());
        let requests = stream::unfold(ordered, async |mut ordered| {
            let order: Order = ordered.recv().await?;
            tasks.borrow_mut().push_back(order.task);
            Some((order.request(), ordered))
        });
        let mut outcomes = pin!(self.app.publish_many(requests));
        let mut refused = 0;
        while let Some(outcome) = outcomes.next().await {
            // Outcomes arrive in the order of the requests.
            let task = tasks.borrow_mut().pop_front().unwrap_or_default();
            match outcome {
                Ok(receipt) => self.hotel.note_confirmed(&receipt, task),
                Err(error) => {
                    refused += 1;
                    self.print(&format!("{task} was not published: {error}"))?;
                }
            }
        }
        Ok(refused)
    }

    /// The operator: redrives the dead letters of the outage, once it is over.
    async fn operate(&self) -> Result<()> {
        self.provider_returned.notified().await;
        loop {
            let mut dead = 0;
            for group in self.dead_groups().await? {
                if group.assessment.root_cause == RootCause::ProviderOutage {
                    self.redrive(&group).await?;
                } else {
                    dead += group.count as usize;
                }
            }
            if self.is_over(dead) {
                return Ok(());
            }
            sleep(LOOK_EVERY).await;
        }
    }

    async fn redrive(&self, group: &FailureGroup) -> Result<()> {
        let task = group.sample.task.as_deref().unwrap_or("unknown");
        let letters = self.letters.clone().because("the payment provider is back");
        let filter = Filter::default().fingerprint(&group.fingerprint);
        let canary = Canary::of(1).wait(CANARY_WAIT);
        let ended = letters.redrive_all(filter).canary(canary).run().await?;
        match ended.state {
            OperationState::Done => self.print(&format!(
                "redriven: {} × {task}, the first as a canary",
                ended.done
            )),
            // The next look tries the rest again.
            _ => self.print(&format!("not all of {task} redriven: {}", ended.note)),
        }
    }

    /// Whether every task has ended, with this many rows in the log that stay dead. A redriven task
    /// that has not started yet is dead for the meter and not in the log.
    fn is_over(&self, dead: usize) -> bool {
        let Hotel { ledger, meter, .. } = &self.hotel;
        self.is_told.load(Ordering::Relaxed)
            && ledger.open(|id| meter.fate(id)) == 0
            && meter.dead() == dead
    }

    async fn dead_groups(&self) -> Result<Vec<FailureGroup>> {
        let dead = Filter::default().state(State::Dead);
        Ok(self.letters.groups(&dead, GROUPS).await?)
    }

    async fn dead_letters(&self) -> Result<Vec<Summary>> {
        let dead = Filter::default().state(State::Dead);
        let listed = self.letters.list(&dead, Page::first(Page::LARGEST)).await?;
        Ok(listed.letters)
    }

    /// Audits every confirmed task. The log decides which are dead, not the meter.
    fn audit(&self, dead: &[Summary]) -> Audit {
        let ids = dead
            .iter()
            .filter_map(|letter| letter.message_id.as_deref());
        let ids: HashSet<&str> = ids.collect();
        let fate = |id: &TaskId| match self.hotel.meter.fate(id) {
            Some(Fate::Dead) if !ids.contains(id.as_str()) => None,
            fate => fate,
        };
        self.hotel.ledger.audit(fate)
    }

    /// Counts the rows of all tiers: ready, scheduled and running.
    async fn left_in_tables(&self) -> Result<Left> {
        let backlog = self.app.backlog()?;
        let (mut rows, mut next) = (0, None);
        loop {
            let everything = TaskFilter::default();
            let page = backlog.list(&everything, next.as_deref(), PAGE).await?;
            rows += page.tasks.len();
            next = page.next;
            if next.is_none() {
                return Ok(Left::InTables { rows });
            }
        }
    }

    fn open(&self) -> String {
        let Hotel { ledger, meter, .. } = &self.hotel;
        let open = ledger.open(|id| meter.fate(id));
        format!("{open} tasks are open, {} are dead letters", meter.dead())
    }

    async fn show(&self) -> Result<()> {
        loop {
            sleep(self.screen.pause(self.hotel.pace)).await;
            self.draw()?;
        }
    }

    fn draw(&self) -> Result<()> {
        self.screen.draw(&Sight {
            title: self.title,
            elapsed: self.begin.elapsed(),
            is_provider_down: self.hotel.provider.is_down(),
            figures: &self.hotel.meter.figures(),
        })?;
        Ok(())
    }

    fn print(&self, message: &str) -> Result<()> {
        self.screen.print_message(self.begin.elapsed(), message)?;
        Ok(())
    }
}
