//! Processes of the hotel, with handlers as in the demo. Each has metrics of its own, which Prometheus scrapes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierline::{Context, Registry, Task, TaskError, TaskOptions, Tierline, Topology};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::exporter::{Exporter, Page};

/// Whether the payment provider is down.
#[derive(Clone, Default)]
pub(super) struct Provider(Arc<AtomicBool>);

impl Provider {
    pub(super) fn set_down(&self, is_down: bool) {
        self.0.store(is_down, Ordering::Relaxed);
    }
}

/// A schedule without a payload publishes `null`.
type Order = Option<Details>;

#[derive(Serialize, Deserialize)]
struct Details {
    /// Whether it always fails.
    is_poison: bool,
}

macro_rules! tasks {
    ($($payload:ident $name:literal $milliseconds:literal;)*) => {
        $(
            #[derive(Default, Serialize, Deserialize)]
            #[serde(transparent)]
            struct $payload(Order);

            impl Task for $payload {
                const NAME: &'static str = $name;
            }
        )*

        fn registry() -> Registry {
            let mut registry = Registry::new();
            $(
                let handler = |order: $payload, cx: Context| {
                    work(cx, order.0, $milliseconds)
                };
                let options = TaskOptions::new().retries(2).backoff("200ms");
                registry.register_with::<$payload, _>(handler, options).unwrap();
            )*
            registry
        }
    };
}

tasks! {
    ProcessStripeWebhook "payments.process_stripe_webhook" 60;
    RecordTransaction "wallet.record_transaction" 20;
    SendOtp "email.send_otp" 40;
    SendPaymentSuccess "email.send_payment_success" 75;
    CreateInvoice "invoices.create" 200;
    RetryInvoices "invoices.retry_failed" 150;
    EnrichContact "contacts.enrich" 150;
    CheckSchedules "health.check_schedules" 50;
    ImportContacts "contacts.import" 350;
    TranscribeCall "calls.transcribe" 125;
}

/// What guests and staff ask for in a second. What follows from payments comes on top.
pub(super) const LOAD: [(&str, usize); 6] = [
    (ProcessStripeWebhook::NAME, 3),
    (SendOtp::NAME, 3),
    (RetryInvoices::NAME, 1),
    (EnrichContact::NAME, 1),
    (ImportContacts::NAME, 1),
    (TranscribeCall::NAME, 2),
];

/// A task of each tier.
pub(super) const OF_EACH_TIER: [&str; 6] = [
    SendOtp::NAME,
    SendPaymentSuccess::NAME,
    CreateInvoice::NAME,
    EnrichContact::NAME,
    ImportContacts::NAME,
    TranscribeCall::NAME,
];

async fn work(cx: Context, order: Order, milliseconds: u64) -> Result<(), TaskError> {
    if order.is_some_and(|it| it.is_poison) {
        return Err("page 3 has a negative number of words".into());
    }
    let is_payment = cx.task() == ProcessStripeWebhook::NAME;
    if is_payment && cx.data::<Provider>().0.load(Ordering::Relaxed) {
        return Err("the payment provider answered 503 Service Unavailable".into());
    }
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
    if is_payment {
        cx.publish(RecordTransaction::default()).await?;
        cx.publish(SendPaymentSuccess::default()).await?;
        cx.publish(CreateInvoice::default()).await?;
    }
    Ok(())
}

/// The servers of all processes.
pub(super) struct Servers<'a> {
    pub(super) amqp: &'a str,
    pub(super) postgres: &'a str,
    pub(super) provider: &'a Provider,
}

/// An app that may work for groups, and its exporter.
pub(super) struct Process {
    pub(super) app: Tierline,
    exporter: Exporter,
    stop: watch::Sender<bool>,
    running: Vec<JoinHandle<Result<(), tierline::Error>>>,
}

impl Process {
    /// Starts one that shows its metrics at this address.
    pub(super) async fn start(
        topology: &Topology,
        servers: &Servers<'_>,
        address: &str,
        groups: &[&str],
    ) -> Self {
        let app = Tierline::builder(topology.clone())
            .amqp(servers.amqp)
            .postgres(servers.postgres)
            .registry(registry())
            .data(servers.provider.clone())
            .metrics()
            .connect()
            .await
            .unwrap();
        let page = Page::Real(app.metrics().unwrap());
        let (stop, _) = watch::channel(false);
        let mut process = Self {
            app,
            exporter: Exporter::start_at(address, page).await,
            stop,
            running: Vec::new(),
        };
        if !groups.is_empty() {
            let worker = process.app.work(groups.iter().copied()).grace("5s");
            let stopped = process.stopped();
            process.running.push(tokio::spawn(worker.until(stopped)));
        }
        process
    }

    /// Lets it publish what is due, too.
    pub(super) fn schedule(&mut self) {
        let scheduler = self.app.scheduler().unwrap();
        let stopped = self.stopped();
        self.running.push(tokio::spawn(scheduler.until(stopped)));
    }

    pub(super) fn address(&self) -> &str {
        &self.exporter.address
    }

    fn stopped(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut stop = self.stop.subscribe();
        async move {
            let _ = stop.wait_for(|is_stopped| *is_stopped).await;
        }
    }

    /// Ends it as a deploy would, and its exporter with it.
    pub(super) async fn end(self) {
        self.stop.send_replace(true);
        for running in self.running {
            running.await.unwrap().unwrap();
        }
        self.app.close().await;
        self.exporter.end().await;
    }
}
