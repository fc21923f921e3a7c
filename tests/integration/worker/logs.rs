//! What a worker logs, for those who have no observer.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex, OnceLock};

use serde::{Deserialize, Serialize};
use tierline::{Registry, Task, TaskError, TaskOptions};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::Working;

#[derive(Serialize, Deserialize)]
struct Call {
    number: u32,
}

impl Task for Call {
    const NAME: &'static str = "logs.call";
}

const MAP: &str = r#"
    app = "hotel"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 1
    [tasks]
    "logs.call" = "normal"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_that_is_retried_is_logged_as_a_warning_with_its_error() {
    let logged = Logged::of_this_process();
    async fn call(_: Call) -> Result<(), TaskError> {
        Err("the line is busy".into())
    }
    let mut registry = Registry::new();
    let options = TaskOptions::new().retries(1);
    registry.register_with::<Call, _>(call, options).unwrap();
    let working = Working::begin(MAP, registry).await;
    let receipt = working.app.publish(Call { number: 7 }).await.unwrap();
    working.heard.until("dead logs.call", 1).await;
    working.end().await;

    let lines = logged.lines.lock().unwrap();
    let about: Vec<&String> = lines
        .iter()
        .filter(|line| line.contains(receipt.id.as_str()))
        .collect();
    assert_eq!(about.len(), 2, "the retry and the dead letter: {about:#?}");
    let retried = about[0];
    assert!(retried.starts_with("WARN"), "{retried}");
    for part in [
        "failed, will be retried",
        "task=\"logs.call\"",
        "attempt=1",
        "after=",
        "error=the line is busy",
    ] {
        assert!(retried.contains(part), "{part}: {retried}");
    }
}

/// The warnings and errors of all workers in this process, a line for each.
#[derive(Clone, Default)]
pub(crate) struct Logged {
    lines: Arc<Mutex<Vec<String>>>,
}

impl Logged {
    pub(crate) fn of_this_process() -> Self {
        static LOGGED: OnceLock<Logged> = OnceLock::new();
        LOGGED
            .get_or_init(|| {
                let logged = Self::default();
                tracing::subscriber::set_global_default(logged.clone()).unwrap();
                logged
            })
            .clone()
    }

    /// How many lines contain this text.
    pub(crate) fn count(&self, text: &str) -> usize {
        let lines = self.lines.lock().unwrap();
        lines.iter().filter(|line| line.contains(text)).count()
    }
}

impl Subscriber for Logged {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.target().starts_with("tierline")
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.lines.lock().unwrap().push(line.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}
