//! Spans of OpenTelemetry, read back from a receiver of OTLP that they were exported to.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry::trace::{TraceContextExt, Tracer};
use opentelemetry::{Context as TraceContext, global};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_sdk::trace::SdkTracerProvider;
use prost::Message;
use serde::{Deserialize, Serialize};
use tierline::{Context, Outcome, Registry, Task, Tierline, Topology};
use tierline_testbed::{database, vhost};
use tokio::net::TcpListener;
use tokio::sync::{OnceCell, oneshot};

use crate::worker::Heard;

const MAP: &str = r#"
    app = "shop"
    [tiers.orders]
    queue = "HOME"
    [tiers.mail]
    queue = "HOME"
    [groups.all]
    tiers = ["orders", "mail"]
    concurrency = 2
    prefetch = 2
    [tasks]
    "order.ship" = "orders"
    "mail.send" = "mail"
"#;

#[derive(Debug, Serialize, Deserialize)]
struct Ship {
    dies: bool,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

#[derive(Debug, Serialize, Deserialize)]
struct Mail;

impl Task for Mail {
    const NAME: &'static str = "mail.send";
}

/// One publishes another task, whose first attempt fails.
fn handlers() -> Registry {
    let mut registry = Registry::new();
    registry
        .register::<Ship, _>(async |ship: Ship, cx: Context| {
            if ship.dies && cx.header("spared").is_none() {
                return Outcome::dead("it cannot be shipped");
            }
            match cx.publish(Mail).await {
                Ok(_) => Outcome::Done,
                Err(error) => Outcome::retry(error.to_string()),
            }
        })
        .unwrap();
    registry
        .register::<Mail, _>(async |_: Mail, cx: Context| match cx.attempt() {
            1 => Outcome::retry("not yet"),
            _ => Outcome::Done,
        })
        .unwrap();
    registry
}

/// A receiver of OTLP over HTTP.
pub(crate) struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
    address: SocketAddr,
}

/// The one whose provider is that of this program.
struct Exported {
    collector: Collector,
    provider: SdkTracerProvider,
}

impl Collector {
    pub(crate) async fn receive() -> Self {
        let spans: Arc<Mutex<Vec<Span>>> = Arc::default();
        let (listening, address) = oneshot::channel();
        let received = spans.clone();
        // It outlives the runtime of the test that starts it.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = { runtime }.enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                listening.send(listener.local_addr().unwrap()).unwrap();
                let routes = axum::Router::new().route("/v1/traces", post(receive));
                let routes = routes.with_state(received);
                axum::serve(listener, routes).await.unwrap();
            });
        });
        let address = address.await.unwrap();
        Self { spans, address }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn trace(&self, trace: &[u8]) -> Trace {
        let spans = self.spans.lock().unwrap();
        let spans = spans.iter().filter(|span| span.trace_id == trace);
        Trace(
            spans
                .map(|span| (span.span_id.clone(), span.clone()))
                .collect(),
        )
    }

    /// The names of the spans of a trace.
    pub(crate) fn names(&self, trace: &[u8]) -> Vec<String> {
        let spans = self.trace(trace).0.into_values();
        spans.map(|span| span.name).collect()
    }
}

impl Exported {
    async fn get() -> &'static Self {
        static EXPORTED: OnceCell<Exported> = OnceCell::const_new();
        EXPORTED.get_or_init(Self::start).await
    }

    async fn start() -> Self {
        let collector = Collector::receive().await;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(format!("{}/v1/traces", collector.url()))
            .build()
            .unwrap();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .build();
        global::set_tracer_provider(provider.clone());
        Self {
            collector,
            provider,
        }
    }

    /// All spans of a trace that have ended, by the span's id.
    async fn trace(&self, trace: &[u8]) -> Trace {
        let provider = self.provider.clone();
        let flushing = tokio::task::spawn_blocking(move || provider.force_flush());
        flushing.await.unwrap().unwrap();
        self.collector.trace(trace)
    }
}

async fn receive(State(spans): State<Arc<Mutex<Vec<Span>>>>, body: Bytes) -> Vec<u8> {
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    let scopes = request
        .resource_spans
        .into_iter()
        .flat_map(|it| it.scope_spans);
    spans.lock().unwrap().extend(scopes.flat_map(|it| it.spans));
    Vec::new()
}

#[derive(Debug)]
struct Trace(HashMap<Vec<u8>, Span>);

impl Trace {
    /// The one span with this name and these attributes.
    fn span(&self, name: &str, attributes: &[(&str, &str)]) -> &Span {
        let found = self.0.values().filter(|span| {
            let has = |(key, value): &(&str, &str)| attribute(span, key).as_deref() == Some(*value);
            span.name == name && attributes.iter().all(has)
        });
        let found: Vec<_> = found.collect();
        assert_eq!(found.len(), 1, "{name} {attributes:?} in {self:#?}");
        found[0]
    }
}

fn attribute(span: &Span, key: &str) -> Option<String> {
    let value = span.attributes.iter().find(|it| it.key == key)?;
    match value.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        other => Some(format!("{other:?}")),
    }
}

fn assert_links(span: &Span, to: &Span) {
    let links: Vec<_> = span.links.iter().map(|link| &link.span_id).collect();
    assert_eq!(links, [&to.span_id], "{span:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_goes_from_a_request_through_handlers_and_retries_to_what_they_publish() {
    let collector = Exported::get().await;
    for (home, system) in [("quorum", "rabbitmq"), ("postgres", "postgresql")] {
        let (vhost, database) = tokio::join!(vhost(), database());
        let heard = Heard::default();
        let app = Tierline::builder(Topology::parse(MAP.replace("HOME", home)).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .registry(handlers())
            .observe(heard.ear())
            .open_telemetry()
            .connect()
            .await
            .unwrap();
        let request = global::tracer("test").start("request");
        let request = TraceContext::current_with_span(request);
        let trace = request.span().span_context().trace_id().to_bytes();
        use opentelemetry::trace::FutureExt;
        let publishing = async { app.publish(Ship { dies: false }).await };
        publishing.with_context(request.clone()).await.unwrap();
        request.span().end();
        let (stop, stopped) = oneshot::channel::<()>();
        let worker = app.work(["all"]).grace(Duration::from_secs(20));
        let worker = tokio::spawn(worker.until(async {
            let _ = stopped.await;
        }));
        heard.until("done mail.send", 1).await;
        stop.send(()).unwrap();
        worker.await.unwrap().unwrap();

        let trace = collector.trace(&trace).await;
        let request = trace.span("request", &[]);
        let published = trace.span("publish orders", &[]);
        assert_eq!(published.parent_span_id, request.span_id);
        assert_eq!(published.kind(), SpanKind::Producer);
        for (key, value) in [
            ("messaging.system", system),
            ("messaging.operation.name", "publish"),
            ("messaging.operation.type", "send"),
            ("messaging.destination.name", "orders"),
            ("tierline.task", "order.ship"),
        ] {
            assert_eq!(attribute(published, key).as_deref(), Some(value), "{key}");
        }
        let shipped = trace.span("process orders", &[("tierline.outcome", "done")]);
        assert_eq!(shipped.parent_span_id, published.span_id);
        assert_links(shipped, published);
        assert_eq!(shipped.kind(), SpanKind::Consumer);
        let id = "messaging.message.id";
        assert_eq!(attribute(shipped, id), attribute(published, id));
        let acked = trace.span("ack orders", &[("messaging.operation.type", "settle")]);
        assert_eq!(acked.parent_span_id, shipped.span_id);
        assert_eq!(acked.kind(), SpanKind::Client);

        let mail = trace.span("publish mail", &[]);
        assert_eq!(mail.parent_span_id, shipped.span_id);
        let failed = trace.span("process mail", &[("tierline.attempt", "1")]);
        assert_eq!(failed.parent_span_id, mail.span_id);
        assert_links(failed, mail);
        assert_eq!(
            attribute(failed, "tierline.outcome").as_deref(),
            Some("retried")
        );
        assert_eq!(failed.status.as_ref().unwrap().code(), StatusCode::Error);
        let retry = trace.span("retry mail", &[]);
        assert_eq!(retry.parent_span_id, failed.span_id);
        assert!(retry.start_time_unix_nano >= failed.end_time_unix_nano);
        let sent = trace.span("process mail", &[("tierline.attempt", "2")]);
        assert_eq!(sent.parent_span_id, mail.span_id);
        assert_links(sent, mail);
        assert_eq!(trace.0.len(), 9, "{trace:#?}");
        app.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redriven_task_goes_on_in_its_trace_with_a_link_to_the_operator() {
    let collector = Exported::get().await;
    let (vhost, database) = tokio::join!(vhost(), database());
    let heard = Heard::default();
    let app = Tierline::builder(Topology::parse(MAP.replace("HOME", "postgres")).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .registry(handlers())
        .observe(heard.ear())
        .open_telemetry()
        .connect()
        .await
        .unwrap();
    let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut request = tierline::task::PublishRequest::new(&Ship { dies: true }).unwrap();
    request.traceparent = Some(given.to_owned());
    let published = app.publish_many(futures_util::stream::iter([request]));
    let published: Vec<_> = futures_util::StreamExt::collect(published).await;
    assert!(published[0].is_ok());
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = tokio::spawn(app.work(["all"]).until(async {
        let _ = stopped.await;
    }));
    heard.until("dead order.ship", 1).await;
    let letters = app.dead_letters().unwrap();
    let listed = letters
        .list(&Default::default(), Default::default())
        .await
        .unwrap();
    let operator = TraceContext::current_with_span(global::tracer("test").start("operator"));
    use opentelemetry::trace::FutureExt;
    let redriving = async { letters.redrive(listed.letters[0].id).await };
    redriving.with_context(operator.clone()).await.unwrap();
    heard.until("dead order.ship", 2).await;
    stop.send(()).unwrap();
    worker.await.unwrap().unwrap();

    let trace = u128::from_str_radix(&given[3..35], 16)
        .unwrap()
        .to_be_bytes();
    let trace = collector.trace(&trace).await;
    let published = trace.span("publish orders", &[]);
    assert_eq!(
        published.parent_span_id,
        u64::from_str_radix(&given[36..52], 16)
            .unwrap()
            .to_be_bytes()
    );
    let redriven = trace.span("redrive orders", &[]);
    assert_eq!(redriven.parent_span_id, published.span_id);
    let link = &redriven.links[0];
    assert_eq!(
        link.trace_id,
        operator.span().span_context().trace_id().to_bytes()
    );
    let mut runs: Vec<_> = trace
        .0
        .values()
        .filter(|it| it.name == "process orders")
        .collect();
    runs.sort_by_key(|span| span.start_time_unix_nano);
    let parents: Vec<_> = runs.iter().map(|run| &run.parent_span_id).collect();
    assert_eq!(parents, [&published.span_id, &redriven.span_id]);
    for run in runs {
        assert_eq!(attribute(run, "tierline.outcome").as_deref(), Some("dead"));
        let dead = trace
            .0
            .values()
            .filter(|it| it.parent_span_id == run.span_id);
        let dead: Vec<_> = dead.map(|it| it.name.as_str()).collect();
        assert_eq!(dead, ["dead_letter orders"]);
    }
    app.close().await;
}
