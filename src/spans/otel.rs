//! Spans through the API of OpenTelemetry, by the names of its semantic conventions for messaging, version 1.37.
//!
//! The conventions link a consumer's span to the one that created the message, and allow it as the parent where a message is
//! processed alone. Here it always is, so a trace goes on from the publish through all attempts to what the handler
//! publishes; the link is there too.

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use opentelemetry::context::FutureExt;
use opentelemetry::global::{self, BoxedTracer};
use opentelemetry::trace::{
    Link, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt, Tracer,
};
use opentelemetry::{Context, KeyValue};

use super::{Processed, parent};
use crate::task::TaskId;
use crate::topology::Topology;

/// Begins spans, if the app has asked for them. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Spans(Option<Arc<Shared>>);

struct Shared {
    tracer: BoxedTracer,
    topology: Topology,
}

/// The span of a publish: what it stores names it as its creator. It ends with its last clone.
#[derive(Clone, Default)]
pub(crate) struct PublishSpan(Option<Begun>);

/// The span of a run of a handler, and of what follows on it.
#[derive(Default)]
pub(crate) struct ProcessSpan {
    begun: Option<Begun>,
    ended_at: OnceLock<SystemTime>,
}

/// The span of a redrive.
#[cfg(feature = "postgres")]
#[derive(Default)]
pub(crate) struct RedriveSpan(Option<Begun>);

#[derive(Clone)]
struct Begun {
    shared: Arc<Shared>,
    /// Holds the span.
    context: Context,
}

impl Spans {
    /// Through the tracer provider that is the global one now.
    pub(crate) fn new(topology: &Topology) -> Self {
        Self(Some(Arc::new(Shared {
            tracer: global::tracer("tierline"),
            topology: topology.clone(),
        })))
    }

    /// Begins the span of a publish in the caller's context. A `traceparent` that the caller gives is its parent, unless
    /// the current span is of that trace.
    pub(crate) fn publish(&self, task: &str, traceparent: Option<&str>) -> PublishSpan {
        PublishSpan(self.0.as_ref().map(|shared| {
            let current = Context::current();
            let given = traceparent.and_then(parent::parse);
            let trace = current.span().span_context().trace_id();
            let parent = match given.filter(|given| given.trace_id() != trace) {
                Some(given) => current.with_remote_span_context(given),
                None => current,
            };
            let builder = named("publish", "send", SpanKind::Producer);
            shared.begin(
                with(builder, [KeyValue::new("tierline.task", task.to_owned())]),
                &parent,
            )
        }))
    }

    /// Begins the span of a run of a handler. The span that published the task is its parent, and a link.
    pub(crate) fn process(&self, task: Processed<'_>, traceparent: Option<&str>) -> ProcessSpan {
        let begun = self.0.as_ref().map(|shared| {
            let creator = traceparent.and_then(parent::parse);
            let name = format!("process {}", task.tier);
            let builder =
                named(name, "process", SpanKind::Consumer).with_links(links(creator.as_ref()));
            let builder = with(builder, shared.attributes(task));
            shared.begin(builder, &remote(creator))
        });
        ProcessSpan {
            begun,
            ended_at: OnceLock::new(),
        }
    }

    /// Begins the span of a redrive. The task goes on in its trace, with a link to the operator's.
    #[cfg(feature = "postgres")]
    pub(crate) fn redrive(
        &self,
        dead_letter: i64,
        task: Option<&str>,
        traceparent: Option<&str>,
    ) -> RedriveSpan {
        RedriveSpan(self.0.as_ref().map(|shared| {
            let creator = traceparent.and_then(parent::parse);
            let current = Context::current();
            let operator = current.span().span_context().clone();
            let builder = named("redrive", "send", SpanKind::Producer);
            let builder = with(
                builder,
                [KeyValue::new("tierline.dead_letter", dead_letter)],
            );
            let task = task.map(|task| KeyValue::new("tierline.task", task.to_owned()));
            let builder = with(builder, task);
            match creator {
                Some(creator) => {
                    let operator = Some(operator).filter(SpanContext::is_valid);
                    let builder = builder.with_links(links(operator.as_ref()));
                    shared.begin(builder, &remote(Some(creator)))
                }
                None => shared.begin(builder, &current),
            }
        }))
    }

    /// The span that is the current one, for what is published by its handler.
    pub(crate) fn current_traceparent(&self) -> Option<String> {
        self.0.as_ref()?;
        parent::write(Context::current().span().span_context())
    }
}

impl Shared {
    fn begin(self: &Arc<Self>, builder: SpanBuilder, parent: &Context) -> Begun {
        let span = self.tracer.build_with_context(builder, parent);
        Begun {
            shared: self.clone(),
            context: parent.with_span(span),
        }
    }

    fn attributes(&self, task: Processed<'_>) -> [KeyValue; 5] {
        [
            self.system(task.tier),
            KeyValue::new("messaging.destination.name", task.tier.to_owned()),
            KeyValue::new("messaging.message.id", task.id.to_owned()),
            KeyValue::new("tierline.task", task.name.to_owned()),
            KeyValue::new("tierline.attempt", i64::from(task.attempt)),
        ]
    }

    fn system(&self, tier: &str) -> KeyValue {
        let system = match self.topology.is_on_broker(tier) {
            true => "rabbitmq",
            false => "postgresql",
        };
        KeyValue::new("messaging.system", system)
    }
}

impl Begun {
    fn traceparent(&self) -> Option<String> {
        parent::write(self.context.span().span_context())
    }

    /// Ends a span of sending.
    fn sent(
        &self,
        operation: &'static str,
        tier: &str,
        more: Option<KeyValue>,
        failed: Option<&'static str>,
    ) {
        let span = self.context.span();
        if span.is_recording() {
            span.update_name(format!("{operation} {tier}"));
            span.set_attribute(self.shared.system(tier));
            let destination = KeyValue::new("messaging.destination.name", tier.to_owned());
            span.set_attributes([destination].into_iter().chain(more));
            if let Some(kind) = failed {
                span.set_attribute(KeyValue::new("error.type", kind));
                span.set_status(Status::error(kind));
            }
        }
        span.end();
    }
}

impl PublishSpan {
    /// What the message carries. `None`: the app has not asked for spans, or nothing records them.
    pub(crate) fn traceparent(&self) -> Option<String> {
        self.0.as_ref()?.traceparent()
    }

    /// The publish has ended; `failed` is the kind of its error.
    pub(crate) fn ended(&self, id: &TaskId, tier: &str, failed: Option<&'static str>) {
        if let Some(begun) = &self.0 {
            let id = KeyValue::new("messaging.message.id", id.as_str().to_owned());
            begun.sent("publish", tier, Some(id), failed);
        }
    }
}

impl ProcessSpan {
    /// Runs a handler so that its span is the current one.
    pub(crate) fn around<F: Future>(&self, handler: F) -> impl Future<Output = F::Output> + use<F> {
        let context = match &self.begun {
            Some(begun) => begun.context.clone(),
            None => Context::current(),
        };
        handler.with_context(context)
    }

    /// The handler has ended; `error` is the kind of its failure. The first call counts.
    pub(crate) fn ended(&self, outcome: &'static str, error: Option<&str>) {
        if let Some(begun) = &self.begun {
            let span = begun.context.span();
            if span.is_recording() {
                span.set_attribute(KeyValue::new("tierline.outcome", outcome));
                if let Some(error) = error {
                    span.set_attribute(KeyValue::new("error.type", error.to_owned()));
                    span.set_status(Status::error(error.to_owned()));
                }
            }
            let now = SystemTime::now();
            let _ = self.ended_at.set(now);
            span.end_with_timestamp(now);
        }
    }

    /// What follows on the run is stored: its next attempt, say. The span of that begins where the handler has ended.
    pub(crate) fn settled(&self, operation: &'static str, task: Processed<'_>) {
        if let Some(begun) = &self.begun {
            if !begun.context.span().span_context().is_sampled() {
                return;
            }
            let name = format!("{operation} {}", task.tier);
            let mut builder = named(name, "settle", SpanKind::Client);
            builder.start_time = self.ended_at.get().copied();
            let builder = with(builder, begun.shared.attributes(task));
            let settling = begun.shared.begin(builder, &begun.context);
            settling.context.span().end();
        }
    }
}

#[cfg(feature = "postgres")]
impl RedriveSpan {
    /// What the message carries.
    pub(crate) fn traceparent(&self) -> Option<String> {
        self.0.as_ref()?.traceparent()
    }

    /// The redrive has ended; `failed` is the kind of its error.
    pub(crate) fn ended(&self, tier: &str, failed: Option<&'static str>) {
        if let Some(begun) = &self.0 {
            begun.sent("redrive", tier, None, failed);
        }
    }
}

/// Runs a future elsewhere in the context of the caller.
#[cfg(feature = "postgres")]
pub(crate) fn in_current_context<F: Future>(work: F) -> impl Future<Output = F::Output> + use<F> {
    work.with_current_context()
}

/// A span of an operation, which its name begins with.
fn named(
    name: impl Into<Cow<'static, str>>,
    kind_of_operation: &'static str,
    kind: SpanKind,
) -> SpanBuilder {
    let name = name.into();
    let operation = name.split(' ').next().unwrap_or_default().to_owned();
    let attributes = [
        KeyValue::new("messaging.operation.name", operation),
        KeyValue::new("messaging.operation.type", kind_of_operation),
    ];
    SpanBuilder::from_name(name)
        .with_kind(kind)
        .with_attributes(attributes)
}

fn with(mut builder: SpanBuilder, more: impl IntoIterator<Item = KeyValue>) -> SpanBuilder {
    builder.attributes.get_or_insert_default().extend(more);
    builder
}

fn links(to: Option<&SpanContext>) -> Vec<Link> {
    let link = to.map(|context| Link::new(context.clone(), Vec::new(), 0));
    link.into_iter().collect()
}

/// The context of a span elsewhere; an empty one without it.
fn remote(span: Option<SpanContext>) -> Context {
    match span {
        Some(span) => Context::new().with_remote_span_context(span),
        None => Context::new(),
    }
}

impl fmt::Debug for Spans {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Spans").field(&self.0.is_some()).finish()
    }
}

impl fmt::Debug for PublishSpan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("PublishSpan")
            .field(&self.0.is_some())
            .finish()
    }
}

impl fmt::Debug for ProcessSpan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("ProcessSpan")
            .field(&self.begun.is_some())
            .finish()
    }
}
