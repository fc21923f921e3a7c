//! The handler of all tasks of the hotel: it takes the task's time, calls the payment provider if the task
//! needs it, fails if the load says so, and records success in the ledger.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tierline::task::Receipt;
use tierline::{Context, Task, TaskError, TaskOptions, Topology};

use crate::ledger::Ledger;
use crate::load::{Job, Trouble};
use crate::meter::Meter;
use crate::pace::Pace;
use crate::tasks::{CreateInvoice, ProcessStripeWebhook, RecordTransaction, SendPaymentSuccess};

/// The panic message of the poison task.
const POISON: &str = "page 3 has a negative number of words";

/// The state that handlers and publishers share.
#[derive(Clone)]
pub(crate) struct Hotel {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) meter: Arc<Meter>,
    pub(crate) provider: Arc<Provider>,
    pub(crate) pace: Pace,
}

impl Hotel {
    pub(crate) fn new(map: &Topology, pace: Pace) -> Self {
        Self {
            ledger: Arc::default(),
            meter: Arc::new(Meter::new(map)),
            provider: Arc::default(),
            pace,
        }
    }

    /// Records that this task is stored.
    pub(crate) fn note_confirmed(&self, receipt: &Receipt, task: &'static str) {
        self.ledger.note_confirmed(&receipt.id, task);
        self.meter.published(&receipt.id, task);
    }
}

/// The payment provider, an external service that may be down.
#[derive(Default)]
pub(crate) struct Provider {
    is_down: AtomicBool,
}

impl Provider {
    pub(crate) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::Relaxed);
    }

    pub(crate) fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
    }

    fn ask(&self) -> Result<(), TaskError> {
        if self.is_down() {
            return Err("the payment provider answered 503 Service Unavailable".into());
        }
        Ok(())
    }
}

/// The retry policy of a task. Tasks that need the provider run out of retries before a long outage is
/// over, and become dead letters.
pub(crate) fn options(task: &str, pace: Pace) -> TaskOptions {
    let retries = if needs_provider(task) { 2 } else { 4 };
    let task_options = TaskOptions::new().retries(retries);
    task_options
        .backoff(pace.backoff(500))
        .timeout(Duration::from_secs(30))
}

fn needs_provider(task: &str) -> bool {
    task.starts_with("payments.") || task.starts_with("stripe.")
}

/// Runs any task.
pub(crate) async fn work(job: Job, cx: Context) -> Result<(), TaskError> {
    let hotel = cx.data::<Hotel>();
    if needs_provider(cx.task()) {
        hotel.provider.ask()?;
    }
    tokio::time::sleep(Duration::from_millis(job.milliseconds)).await;
    match job.trouble {
        Trouble::Fails { attempts } if cx.attempt() <= attempts => {
            return Err(format!("connection reset while working on {}", job.about).into());
        }
        Trouble::Poison => panic!("{POISON}"),
        _ => {}
    }
    if cx.task() == ProcessStripeWebhook::NAME {
        follow_payment(&job.about, &cx).await?;
    }
    hotel.ledger.note_done(cx.id());
    Ok(())
}

/// Publishes the tasks that follow a payment, with ids that a repeated attempt would repeat.
async fn follow_payment(about: &str, cx: &Context) -> Result<(), TaskError> {
    let hotel = cx.data::<Hotel>();
    let job = |task| Job::usual(task, about, hotel.pace);
    let id = |what: &str| format!("{}-{what}", cx.id());
    let transaction = RecordTransaction(job(RecordTransaction::NAME));
    let receipt = cx.publish(transaction).id(id("transaction")).await?;
    hotel.note_confirmed(&receipt, RecordTransaction::NAME);
    let mail = SendPaymentSuccess(job(SendPaymentSuccess::NAME));
    let receipt = cx.publish(mail).id(id("mail")).await?;
    hotel.note_confirmed(&receipt, SendPaymentSuccess::NAME);
    let invoice = CreateInvoice(job(CreateInvoice::NAME));
    let receipt = cx.publish(invoice).id(id("invoice")).await?;
    hotel.note_confirmed(&receipt, CreateInvoice::NAME);
    Ok(())
}

/// Keeps the poison's panics off the screen: they are in the log of dead letters. Other panics are
/// printed as usual.
pub(crate) fn keep_the_poison_quiet() {
    let shown = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload_as_str() != Some(POISON) {
            shown(panic);
        }
    }));
}
