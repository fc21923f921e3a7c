//! The last resort for a machine without the servers' programs: the services of
//! `docker-compose.yml`, under a project name and on ports of their own.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::folder::Folder;
use crate::guard::End;
use crate::ports::Port;
use crate::process::{self, Process};

const ASK_LIMIT: Duration = Duration::from_secs(15);
const START_LIMIT: Duration = Duration::from_secs(300);

/// One service of the compose file, stopped when this value is dropped.
#[derive(Debug)]
pub(crate) struct Compose {
    _attached: Process,
    port: Port,
    management: Port,
    _folder: Folder,
}

impl Compose {
    /// Whether Docker is there, and its engine runs.
    pub(crate) async fn is_there() -> bool {
        let mut ask = Command::new("docker");
        ask.args(["compose", "ls"]);
        process::run(ask, ASK_LIMIT).await.is_ok()
    }

    /// Starts `service` of the compose file.
    pub(crate) async fn start(file: &Path, service: &str) -> Result<Compose> {
        eprintln!("starting {service} with docker compose");
        let (port, management) = (Port::reserve()?, Port::reserve()?);
        let folder = Folder::create("compose")?;
        let project = format!("tierline-{}-{}", std::process::id(), port.number());
        let compose = |arguments: &[&str]| {
            let mut command = Command::new("docker");
            command
                .args(["compose", "--project-name", &project, "--file"])
                .arg(file)
                .args(arguments)
                .env("TIERLINE_AMQP_PORT", port.number().to_string())
                .env("TIERLINE_POSTGRES_PORT", port.number().to_string())
                .env("TIERLINE_MANAGEMENT_PORT", management.number().to_string());
            command
        };
        // Attached, so that the containers stop with this process, however it ends.
        let output = folder.path().join("output.log");
        let up = compose(&["up", "--no-color", service]);
        let attached = Process::spawn("docker compose", up, &output, End::Terminate)?;
        let wait = compose(&["up", "--detach", "--wait", service]);
        process::run(wait, START_LIMIT)
            .await
            .with_context(|| format!("{service} of docker compose did not become healthy"))?;
        Ok(Compose {
            _attached: attached,
            port,
            management,
            _folder: folder,
        })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port.number()
    }

    pub(crate) fn management_port(&self) -> u16 {
        self.management.number()
    }
}
