//! `tierline stats`: how each tier is doing.

pub(crate) mod arguments;
mod show;

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use serde_json::json;
use tierline::{Tierline, Topology};
use tokio::time::{sleep, timeout};

use crate::arguments::read_duration;
use crate::connect::builder;
use crate::output::{Failure, Output};
use arguments::{Observed, Stats as Command};

/// The shortest pause between two questions: each reads up to 10,000 rows of each tier.
const SHORTEST_PAUSE: Duration = Duration::from_millis(200);
/// How long the goodbye to the servers may take.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);

pub(crate) async fn run(command: Command) -> Result<Output, Failure> {
    let pause = command.watch.as_deref();
    let pause = pause
        .map(|text| read_duration("--watch", text))
        .transpose()?;
    let app = command.app.connect()?;
    let output = match pause {
        Some(pause) => watch(&app, pause.max(SHORTEST_PAUSE), command.app.log.input.json).await,
        None => {
            let stats = app.stats().await?;
            Ok(Output {
                text: show::stats(&stats),
                json: json!(stats),
                // What is not known may be what is wrong.
                is_well: stats.problems.is_empty(),
            })
        }
    };
    let _ = timeout(CLOSE_LIMIT, app.close()).await;
    output
}

/// Prints until nobody reads.
async fn watch(app: &Tierline, pause: Duration, is_json: bool) -> Result<Output, Failure> {
    let is_terminal = io::stdout().is_terminal();
    loop {
        let stats = app.stats().await?;
        let text = match is_json {
            true => format!("{}\n", json!(stats)),
            // From the top left corner on, and nothing below.
            false if is_terminal => format!("\x1b[H\x1b[2J{}\n", show::stats(&stats)),
            false => format!("{}\n", show::stats(&stats)),
        };
        let mut out = io::stdout().lock();
        let printed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        drop(out);
        if let Err(error) = printed {
            return match error.kind() {
                io::ErrorKind::BrokenPipe => Ok(Output::well(String::new(), json!({}))),
                _ => Err(Failure::Misused(format!(
                    "cannot print the statistics: {error}"
                ))),
            };
        }
        sleep(pause).await;
    }
}

impl Observed {
    /// The app. A server that is away hides its own part only.
    pub(crate) fn connect(&self) -> Result<Tierline, Failure> {
        let topology = Topology::load(&self.log.input.file)?;
        let mut app = builder(topology, &self.broker, &self.log.database)?.publish_connections(1);
        if let Some(management) = &self.management.management {
            app = app.management(management.expose());
        }
        Ok(app.connect_lazy()?)
    }
}
