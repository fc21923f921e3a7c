//! Writes what the library warns of into the log.

use std::fmt::Debug;
use std::sync::Arc;

use anyhow::Result;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::log::{Line, What, Writer};

/// From now on, for the whole process.
pub(crate) fn write_to(log: &Arc<Writer>) -> Result<()> {
    Ok(tracing::subscriber::set_global_default(Warnings(
        log.clone(),
    ))?)
}

struct Warnings(Arc<Writer>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.target().starts_with("tierline")
    }

    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        let about = format!("{}: {}", event.metadata().target(), message.0);
        self.0.write(&Line::new(What::Warning, "", 0, "", &about));
    }

    // Only events are written.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// What an event is about, without its cause, which may differ from time to time.
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.0.insert_str(0, &format!("{value:?}")),
            "error" | "cause" => {}
            name => self.0 += &format!(" ({name} {value:?})"),
        }
    }
}
