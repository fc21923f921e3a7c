//! A private Prometheus, and `promtool`, which checks and tests its rules.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::folder::Folder;
use crate::guard::End;
use crate::ports::Port;
use crate::process::{self, Process, until};
use crate::provide::packages;

const START_LIMIT: Duration = Duration::from_secs(60);
const ASK_LIMIT: Duration = Duration::from_secs(30);
/// A test of rules over three days of samples takes some seconds of processor time.
const TOOL_LIMIT: Duration = Duration::from_secs(300);

/// A private Prometheus on 127.0.0.1, which scrapes and evaluates rules every second. Dropped, it is ended and its data
/// removed.
#[derive(Debug)]
pub struct Prometheus {
    port: Port,
    agent: ureq::Agent,
    _process: Process,
    _folder: Folder,
}

/// What a Prometheus scrapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScrapeTarget {
    address: String,
    path: String,
    token: Option<String>,
}

impl ScrapeTarget {
    /// `/metrics` of an address (`127.0.0.1:9000`) that answers everybody.
    pub fn open(address: &str) -> Self {
        Self {
            address: address.to_owned(),
            path: "/metrics".to_owned(),
            token: None,
        }
    }

    /// A path of an address that wants this bearer token.
    pub fn guarded(address: &str, path: &str, token: &str) -> Self {
        Self {
            address: address.to_owned(),
            path: path.to_owned(),
            token: Some(token.to_owned()),
        }
    }
}

/// An alert that fires, or is about to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FiringAlert {
    /// Its name.
    pub name: String,
    /// Whether its time (`for`) is over.
    pub is_firing: bool,
    /// All its labels.
    pub labels: BTreeMap<String, String>,
}

impl Prometheus {
    /// Installs Prometheus with `promtool` if it is missing and that is allowed.
    ///
    /// # Errors
    /// Says what to install otherwise.
    pub async fn provide() -> Result<()> {
        match program("prometheus").and_then(|_| program("promtool")) {
            Ok(_) => Ok(()),
            Err(_) => packages(&["prometheus"]).await,
        }
    }

    /// Starts one with a rules file, which scrapes these targets as the job `job`.
    pub async fn start(job: &str, targets: &[ScrapeTarget], rules: &str) -> Result<Prometheus> {
        let folder = Folder::create("prometheus")?;
        let port = Port::reserve()?;
        let rules_file = folder.path().join("rules.yml");
        fs::write(&rules_file, rules)?;
        let scrapes: Vec<Value> = targets
            .iter()
            .enumerate()
            .map(|(index, target)| scrape(job, index, target, folder.path()))
            .collect::<Result<_>>()?;
        // JSON is YAML, too.
        let settings = serde_json::json!({
            "global": { "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s" },
            "rule_files": [rules_file],
            "scrape_configs": scrapes,
        });
        let file = folder.path().join("prometheus.yml");
        fs::write(&file, settings.to_string())?;
        let mut command = Command::new(program("prometheus")?);
        command
            .current_dir(folder.path())
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.path().join("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{}", port.number()));
        let output = folder.path().join("output.log");
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(ASK_LIMIT))
            .http_status_as_error(false)
            .build()
            .new_agent();
        let mut started = Process::spawn("Prometheus", command, &output, End::Kill)?;
        let ready = format!("http://127.0.0.1:{}/-/ready", port.number());
        let waited = until("being ready", START_LIMIT, async || {
            started.check()?;
            let (agent, ready) = (agent.clone(), ready.clone());
            let answered = tokio::task::spawn_blocking(move || agent.get(&ready).call()).await?;
            Ok(answered.is_ok_and(|answer| answer.status().is_success()))
        });
        waited.await.context("Prometheus did not start")?;
        Ok(Prometheus {
            port,
            agent,
            _process: started,
            _folder: folder,
        })
    }

    /// The values of an expression now, with their labels.
    pub async fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let data = self.ask("query", Some(expression)).await?;
        let values = data["result"].as_array();
        Ok(values
            .context("an answer of Prometheus has no result")?
            .clone())
    }

    /// The alerts that fire, or are about to.
    pub async fn alerts(&self) -> Result<Vec<FiringAlert>> {
        let data = self.ask("alerts", None).await?;
        let alerts = data["alerts"].as_array();
        let alerts = alerts.context("an answer of Prometheus has no alerts")?;
        let read = |alert: &Value| {
            let labels: BTreeMap<String, String> = serde_json::from_value(alert["labels"].clone())
                .context("an alert has no labels")?;
            Ok(FiringAlert {
                name: labels.get("alertname").cloned().unwrap_or_default(),
                is_firing: alert["state"] == "firing",
                labels,
            })
        };
        alerts.iter().map(read).collect()
    }

    /// The problems that evaluating rules met with.
    pub async fn rule_errors(&self) -> Result<Vec<String>> {
        let data = self.ask("rules", None).await?;
        let groups = data["groups"].as_array().into_iter().flatten();
        let rules = groups.flat_map(|group| group["rules"].as_array().into_iter().flatten());
        let failed = rules.filter(|rule| rule["health"] == "err");
        Ok(failed
            .map(|rule| format!("{}: {}", rule["name"], rule["lastError"]))
            .collect())
    }

    /// Where it listens, for a look by hand.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port.number())
    }

    async fn ask(&self, what: &str, query: Option<&str>) -> Result<Value> {
        let url = format!("{}/api/v1/{what}", self.url());
        let (agent, query) = (self.agent.clone(), query.map(ToOwned::to_owned));
        let asked = tokio::task::spawn_blocking(move || {
            let mut request = agent.get(&url);
            if let Some(query) = &query {
                request = request.query("query", query);
            }
            let answer = request.call()?.body_mut().read_json::<Value>()?;
            ensure!(
                answer["status"] == "success",
                "Prometheus refused {query:?}: {}",
                answer["error"]
            );
            Ok(answer["data"].clone())
        });
        asked.await?
    }
}

/// The settings of one target. No two may have one name, so the job is a label.
fn scrape(job: &str, index: usize, target: &ScrapeTarget, folder: &Path) -> Result<Value> {
    let mut scrape = serde_json::json!({
        "job_name": format!("{job}-{index}"),
        "metrics_path": target.path,
        "static_configs": [{ "targets": [target.address], "labels": { "job": job } }],
    });
    if let Some(token) = &target.token {
        let file = folder.join(format!("token-{index}"));
        fs::write(&file, token)?;
        scrape["authorization"] = serde_json::json!({ "credentials_file": file });
    }
    Ok(scrape)
}

/// `promtool`, with a folder for the files that it reads.
#[derive(Debug)]
pub struct Promtool {
    program: PathBuf,
    folder: Folder,
}

impl Promtool {
    /// Installs it if it is missing and that is allowed.
    pub async fn provide() -> Result<Promtool> {
        Prometheus::provide().await?;
        Ok(Promtool {
            program: program("promtool")?,
            folder: Folder::create("promtool")?,
        })
    }

    /// The folder that its files are in.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a file that others name by `name`.
    pub fn write(&self, name: &str, content: &str) -> Result<()> {
        let path = self.folder.path().join(name);
        fs::write(&path, content).with_context(|| format!("could not write {}", path.display()))
    }

    /// Checks a rules file.
    ///
    /// # Errors
    /// Has what it printed.
    pub async fn check_rules(&self, name: &str) -> Result<String> {
        self.run(&["check", "rules", name]).await
    }

    /// Checks the configuration of a Prometheus, whose files may be elsewhere.
    ///
    /// # Errors
    /// Has what it printed.
    pub async fn check_configuration(&self, name: &str) -> Result<String> {
        self.run(&["check", "config", "--syntax-only", name]).await
    }

    /// Runs a file of tests of rules.
    ///
    /// # Errors
    /// Has what it printed.
    pub async fn test_rules(&self, name: &str) -> Result<String> {
        self.run(&["test", "rules", name]).await
    }

    async fn run(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.current_dir(self.folder.path()).args(arguments);
        process::run(command, TOOL_LIMIT).await
    }
}

fn program(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
        .with_context(|| {
            format!(
                "{name} is not on this machine: run this as root on Debian, which installs it, or install the package \
                 prometheus"
            )
        })
}
