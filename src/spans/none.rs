//! The same without the feature: nothing.

use std::future::Future;

use super::Processed;
use crate::task::TaskId;

#[derive(Debug, Clone, Default)]
pub(crate) struct Spans(());

#[derive(Debug, Clone, Default)]
pub(crate) struct PublishSpan(());

#[derive(Debug, Default)]
pub(crate) struct ProcessSpan(());

#[cfg(feature = "postgres")]
#[derive(Debug, Default)]
pub(crate) struct RedriveSpan(());

impl Spans {
    pub(crate) fn publish(&self, _task: &str, _traceparent: Option<&str>) -> PublishSpan {
        PublishSpan(())
    }

    pub(crate) fn process(&self, _task: Processed<'_>, _traceparent: Option<&str>) -> ProcessSpan {
        ProcessSpan(())
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn redrive(
        &self,
        _dead_letter: i64,
        _task: Option<&str>,
        _traceparent: Option<&str>,
    ) -> RedriveSpan {
        RedriveSpan(())
    }

    pub(crate) fn current_traceparent(&self) -> Option<String> {
        None
    }
}

impl PublishSpan {
    pub(crate) fn traceparent(&self) -> Option<String> {
        None
    }

    pub(crate) fn ended(&self, _id: &TaskId, _tier: &str, _failed: Option<&'static str>) {}
}

impl ProcessSpan {
    pub(crate) fn around<F: Future>(&self, handler: F) -> F {
        handler
    }

    pub(crate) fn ended(&self, _outcome: &'static str, _error: Option<&str>) {}

    pub(crate) fn settled(&self, _operation: &'static str, _task: Processed<'_>) {}
}

#[cfg(feature = "postgres")]
impl RedriveSpan {
    pub(crate) fn traceparent(&self) -> Option<String> {
        None
    }

    pub(crate) fn ended(&self, _tier: &str, _failed: Option<&'static str>) {}
}

/// Runs a future elsewhere in the context of the caller.
#[cfg(feature = "postgres")]
pub(crate) fn in_current_context<F: Future>(work: F) -> F {
    work
}
