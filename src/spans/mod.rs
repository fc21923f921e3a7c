//! Spans of OpenTelemetry around publishes, runs of handlers, what follows on them, and redrives (feature `otel`).
//!
//! They go to the global tracer provider of the API, so the program chooses what exports them. Without the feature, or where
//! [`Builder::open_telemetry`](crate::Builder::open_telemetry) did not ask for them, all of this does nothing.

#[cfg(feature = "otel")]
mod otel;
#[cfg(feature = "otel")]
mod parent;
#[cfg(feature = "otel")]
pub(crate) use otel::{ProcessSpan, PublishSpan, Spans};
#[cfg(all(feature = "otel", feature = "postgres"))]
pub(crate) use otel::{RedriveSpan, in_current_context};

#[cfg(not(feature = "otel"))]
mod none;
#[cfg(not(feature = "otel"))]
pub(crate) use none::{ProcessSpan, PublishSpan, Spans};
#[cfg(all(not(feature = "otel"), feature = "postgres"))]
pub(crate) use none::{RedriveSpan, in_current_context};

/// The attempt that a span is about.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(feature = "otel"),
    expect(dead_code, reason = "nothing reads it without spans")
)]
pub(crate) struct Processed<'a> {
    pub(crate) name: &'a str,
    pub(crate) id: &'a str,
    pub(crate) tier: &'a str,
    pub(crate) attempt: u32,
}
