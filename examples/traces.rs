//! `cargo run --example traces`: one trace from a request to the retry of a task that a handler published.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`, and sends the spans to a collector of OpenTelemetry at
//! `OTEL_EXPORTER_OTLP_ENDPOINT`, else `http://localhost:4318`. Jaeger is one:
//! `docker run -p 4318:4318 -p 16686:16686 jaegertracing/jaeger`.

use std::sync::Arc;

use opentelemetry::global;
use opentelemetry::trace::{FutureExt, TraceContextExt, Tracer};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use serde::{Deserialize, Serialize};
use tierline::{Context, TaskError, Tierline, Topology, task};
use tokio::sync::Notify;

const MAP: &str = r#"
    app = "traces"

    [tiers.orders]
    queue = "quorum"

    [tiers.mail]
    queue = "quorum"

    [groups.all]
    tiers = ["orders", "mail"]
    concurrency = 4

    [tasks]
    "order.ship" = "orders"
    "mail.send" = "mail"
"#;

#[derive(Serialize, Deserialize)]
struct Ship {
    order: u32,
}

#[derive(Serialize, Deserialize)]
struct Mail {
    order: u32,
}

// No handler knows of traces.
#[task(name = "order.ship")]
async fn ship(ship: Ship, cx: Context) -> Result<(), TaskError> {
    cx.publish(Mail { order: ship.order }).await?;
    println!("order {} is shipped", ship.order);
    Ok(())
}

#[task(name = "mail.send", retries = 3, backoff = "100ms")]
async fn send(mail: Mail, cx: Context) -> Result<(), TaskError> {
    if cx.attempt() == 1 {
        return Err("the mail server is busy".into());
    }
    println!("the mail about order {} is sent", mail.order);
    cx.data::<Arc<Notify>>().notify_one();
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let exporter = SpanExporter::builder().with_http().build()?;
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(Resource::builder().with_service_name("traces").build())
        // All, for this example. In production 1 %: `Sampler::TraceIdRatioBased(0.01)` in the place of `AlwaysOn`.
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)))
        .build();
    global::set_tracer_provider(provider.clone());

    let url = std::env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let sent = Arc::new(Notify::new());
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(url)
        .data(sent.clone())
        .open_telemetry()
        .connect()
        .await?;

    // Usually a layer of the web framework begins this span.
    let request = global::tracer("shop").start("POST /orders");
    let request = opentelemetry::Context::current_with_span(request);
    let publishing = async { app.publish(Ship { order: 7 }).await };
    publishing.with_context(request.clone()).await?;
    println!("trace {}", request.span().span_context().trace_id());
    request.span().end();

    app.work(["all"]).until(sent.notified()).await?;
    app.close().await;
    tokio::task::spawn_blocking(move || provider.shutdown()).await??;
    Ok(())
}
