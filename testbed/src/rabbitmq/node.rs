//! One private RabbitMQ node: started, steered, gone with the value.

use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use super::management::Management;
use super::release::Release;
use super::tls;
use crate::folder::Folder;
use crate::guard::End;
use crate::ports::Port;
use crate::process::{self, Process, until};

const START_LIMIT: Duration = Duration::from_secs(300);
const STOP_LIMIT: Duration = Duration::from_secs(60);
const STEER_LIMIT: Duration = Duration::from_secs(60);

/// The watermark that nodes run with; an alarm is raised by setting it to zero.
const MEMORY_WATERMARK: &str = "0.6";

/// What a node has beyond the bare broker.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plugins {
    /// The management API. Virtual hosts need it.
    pub management: bool,
    /// Metrics for Prometheus.
    pub prometheus: bool,
    /// A listener with TLS, whose certificate is vouched for by nobody but [`Node::ca_file`].
    pub tls: bool,
}

impl Plugins {
    /// What most tests want: the management API, and no metrics.
    pub fn management() -> Plugins {
        Plugins {
            management: true,
            ..Plugins::default()
        }
    }
}

/// What all nodes of one broker share: their names are known to one port mapper, apart from any
/// other on the machine, and they trust each other by one cookie.
#[derive(Debug)]
pub(crate) struct Family {
    release: Release,
    epmd_port: Port,
    _epmd: Process,
    cookie: String,
    folder: Folder,
}

impl Family {
    pub(crate) fn start(release: Release) -> Result<Arc<Family>> {
        let folder = Folder::create("rabbitmq")?;
        let epmd_port = Port::reserve()?;
        let output = folder.path().join("epmd.log");
        let epmd = Process::spawn("epmd", release.epmd(epmd_port.number()), &output, End::Kill)?;
        let cookie = format!("TIERLINE{}{}", std::process::id(), epmd_port.number());
        Ok(Arc::new(Family {
            release,
            epmd_port,
            _epmd: epmd,
            cookie,
            folder,
        }))
    }
}

/// A private RabbitMQ node on 127.0.0.1. Dropped, it is killed and its data removed.
#[derive(Debug)]
pub struct Node {
    name: String,
    family: Arc<Family>,
    amqp: Port,
    distribution: Port,
    management: Option<Port>,
    prometheus: Option<Port>,
    tls: Option<Port>,
    process: Mutex<Option<Process>>,
}

impl Node {
    /// Prepares a node's folder and ports. `seed` is the node whose cluster it joins as it boots.
    pub(crate) fn prepare(
        family: &Arc<Family>,
        name: &str,
        plugins: Plugins,
        seed: Option<&Node>,
    ) -> Result<Node> {
        let node = Node {
            name: format!("{name}@localhost"),
            family: Arc::clone(family),
            amqp: Port::reserve()?,
            distribution: Port::reserve()?,
            management: plugins.management.then(Port::reserve).transpose()?,
            prometheus: plugins.prometheus.then(Port::reserve).transpose()?,
            tls: plugins.tls.then(Port::reserve).transpose()?,
            process: Mutex::new(None),
        };
        node.write_files(seed)?;
        Ok(node)
    }

    fn write_files(&self, seed: Option<&Node>) -> Result<()> {
        let folder = self.path("");
        fs::create_dir_all(folder.join("data"))?;
        fs::create_dir_all(folder.join("log"))?;

        let mut configuration = vec![
            format!("listeners.tcp.default = 127.0.0.1:{}", self.amqp.number()),
            format!("vm_memory_high_watermark.relative = {MEMORY_WATERMARK}"),
            // A full disk of the machine would raise an alarm that no test asked for.
            "disk_free_limit.absolute = 1MB".to_owned(),
            "log.file.level = info".to_owned(),
        ];
        let mut plugins = Vec::new();
        if let Some(port) = &self.management {
            plugins.push("rabbitmq_management");
            configuration.push("management.tcp.ip = 127.0.0.1".to_owned());
            configuration.push(format!("management.tcp.port = {}", port.number()));
        }
        if let Some(port) = &self.prometheus {
            plugins.push("rabbitmq_prometheus");
            configuration.push("prometheus.tcp.ip = 127.0.0.1".to_owned());
            configuration.push(format!("prometheus.tcp.port = {}", port.number()));
        }
        if let Some(port) = &self.tls {
            configuration.extend(tls::listener(&folder, port.number())?);
        }
        if let Some(seed) = seed {
            configuration
                .push("cluster_formation.peer_discovery_backend = classic_config".to_owned());
            configuration.push(format!(
                "cluster_formation.classic_config.nodes.1 = {}",
                seed.name
            ));
            configuration.push(format!(
                "cluster_formation.classic_config.nodes.2 = {}",
                self.name
            ));
        }
        fs::write(
            folder.join("rabbitmq.conf"),
            configuration.join("\n") + "\n",
        )?;
        fs::write(
            folder.join("plugins"),
            format!("[{}].\n", plugins.join(",")),
        )?;

        let cookie = folder.join(".erlang.cookie");
        // What is there from before cannot be written to.
        let _ = fs::remove_file(&cookie);
        fs::write(&cookie, &self.family.cookie)?;
        fs::set_permissions(&cookie, std::os::unix::fs::PermissionsExt::from_mode(0o400))?;
        Ok(())
    }

    /// Starts the node and waits until it takes connections. Its durable data is kept from before.
    pub async fn start(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        if process.is_some() {
            return Ok(());
        }
        let before = self.starts_in_full()?;
        let mut started = Process::spawn(
            &format!("RabbitMQ node {}", self.name),
            self.command("rabbitmq-server"),
            &self.output(),
            End::Kill,
        )?;
        until("a start in full", START_LIMIT, async || {
            started.check()?;
            Ok(self.starts_in_full()? > before)
        })
        .await
        .with_context(|| format!("RabbitMQ node {} did not start", self.name))?;
        *process = Some(started);
        Ok(())
    }

    /// How often the node has started in full, as it prints itself.
    ///
    /// It takes connections a moment before; a virtual host created in that moment on a cluster hangs (seen
    /// on 3.10.8). `rabbitmqctl await_startup` tells the same for a second of processor time.
    fn starts_in_full(&self) -> Result<usize> {
        let output = match fs::read_to_string(self.output()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
            read => read?,
        };
        // Not the words before it: a report of Erlang may stand between them (4.3.6, a node that joins a cluster).
        Ok(output.matches(" completed with ").count())
    }

    /// Whether another test can use it: it runs, answers and has no alarm.
    pub(crate) async fn is_well(&self) -> bool {
        self.resume().await.is_ok()
            && self.accepts_connections().await
            && self.has_alarm().await.is_ok_and(|has_alarm| !has_alarm)
    }

    /// Asks the node to shut down and waits until it has. Stopping a stopped node is fine.
    pub async fn stop(&self) -> Result<()> {
        self.end(Signal::TERM).await
    }

    /// Ends the node with `SIGKILL`, as a crash or a power cut would.
    pub async fn kill(&self) -> Result<()> {
        self.end(Signal::KILL).await
    }

    /// [`Node::stop`], then [`Node::start`].
    pub async fn restart(&self) -> Result<()> {
        self.stop().await?;
        self.start().await
    }

    async fn end(&self, signal: Signal) -> Result<()> {
        let mut process = self.process.lock().await;
        if let Some(running) = process.as_mut() {
            running.signal(signal)?;
            running.ended(STOP_LIMIT).await?;
            *process = None;
        }
        Ok(())
    }

    /// Removes all that a node which is not running has stored, as the loss of its disk would.
    pub fn forget_all(&self) -> Result<()> {
        let data = self.path("data");
        fs::remove_dir_all(&data).with_context(|| format!("could not remove {}", data.display()))
    }

    /// Has a node that has stored nothing join the cluster of `member` when it starts.
    pub fn join(&self, member: &Node) -> Result<()> {
        self.write_files(Some(member))
    }

    /// Freezes the node (`SIGSTOP`): its connections stay open and nothing answers, from when this returns.
    pub async fn pause(&self) -> Result<()> {
        let process = self.process.lock().await;
        let running = process.as_ref();
        let running =
            running.with_context(|| format!("RabbitMQ node {} is not running", self.name))?;
        running.freeze().await
    }

    /// Lets a frozen node go on (`SIGCONT`).
    pub async fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT).await
    }

    async fn signal(&self, signal: Signal) -> Result<()> {
        let process = self.process.lock().await;
        process
            .as_ref()
            .with_context(|| format!("RabbitMQ node {} is not running", self.name))?
            .signal(signal)
    }

    /// Has the node close every client connection.
    pub async fn close_all_connections(&self) -> Result<()> {
        self.rabbitmqctl(&["close_all_connections", "--global", "closed by the test"])
            .await?;
        Ok(())
    }

    /// Raises a memory alarm: the node stops reading from connections that publish.
    pub async fn raise_memory_alarm(&self) -> Result<()> {
        self.set_memory_watermark("0").await?;
        until("the memory alarm", STEER_LIMIT, async || {
            self.has_alarm().await
        })
        .await
    }

    /// Clears the alarm again.
    pub async fn clear_memory_alarm(&self) -> Result<()> {
        self.set_memory_watermark(MEMORY_WATERMARK).await?;
        until("the end of the alarm", STEER_LIMIT, async || {
            Ok(!self.has_alarm().await?)
        })
        .await
    }

    async fn set_memory_watermark(&self, watermark: &str) -> Result<()> {
        self.rabbitmqctl(&["set_vm_memory_high_watermark", watermark])
            .await?;
        Ok(())
    }

    async fn has_alarm(&self) -> Result<bool> {
        Ok(!self.management()?.passes("local-alarms").await?)
    }

    /// Has the node write down which quorum queues it has.
    ///
    /// RabbitMQ does that by itself only after half a second without declarations; a node that is
    /// killed before then comes back with quorum queues that never elect a leader (seen on 3.10.8).
    pub async fn flush_declarations(&self) -> Result<()> {
        self.rabbitmqctl(&["eval", "[dets:sync(Table) || Table <- dets:all()]."])
            .await?;
        Ok(())
    }

    /// Runs `rabbitmqctl` on this node and gives what it printed. Costs most of a second.
    pub async fn rabbitmqctl(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.command("rabbitmqctl");
        command.arg("--quiet").args(arguments);
        process::run(command, STEER_LIMIT).await
    }

    /// The name by which the cluster knows it, such as `a@localhost`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder of its files. Its scripts can reach what is in there, even from a chroot.
    pub fn folder(&self) -> std::path::PathBuf {
        self.path("")
    }

    /// The URL for clients, with the default virtual host.
    pub fn amqp_url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}", self.amqp.number())
    }

    /// The URL for clients with TLS, if it was asked for.
    pub fn amqps_url(&self) -> Option<String> {
        let port = self.tls.as_ref()?;
        Some(format!("amqps://guest:guest@localhost:{}", port.number()))
    }

    /// The certificate of whoever vouches for the node's own.
    pub fn ca_file(&self) -> std::path::PathBuf {
        self.path(tls::CA_FILE)
    }

    /// The port for clients on 127.0.0.1.
    pub fn amqp_port(&self) -> u16 {
        self.amqp.number()
    }

    /// The release that it runs, such as `3.10.8`.
    pub fn version(&self) -> &str {
        self.family.release.version()
    }

    /// Where the metrics are, if the plugin was asked for.
    pub fn prometheus_url(&self) -> Option<String> {
        let port = self.prometheus.as_ref()?;
        Some(format!("http://127.0.0.1:{}/metrics", port.number()))
    }

    /// The URL of the management API with its credentials, if the plugin was asked for.
    pub fn management_url(&self) -> Option<String> {
        let port = self.management.as_ref()?;
        Some(format!("http://guest:guest@127.0.0.1:{}", port.number()))
    }

    /// The management API, if the plugin was asked for.
    pub(crate) fn management(&self) -> Result<Management> {
        let url = self.management_url().with_context(|| {
            format!(
                "node {} was started without the management plugin",
                self.name
            )
        })?;
        Ok(Management::at(&url))
    }

    fn command(&self, script: &str) -> Command {
        let folder = self.path("");
        let mut command = self
            .family
            .release
            .command(script, self.family.folder.path());
        command
            .env("HOME", &folder)
            .env("LANG", "C.UTF-8")
            .env("ERL_EPMD_PORT", self.family.epmd_port.number().to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODENAME", &self.name)
            .env("RABBITMQ_DIST_PORT", self.distribution.number().to_string())
            .env("RABBITMQ_MNESIA_BASE", folder.join("data"))
            .env("RABBITMQ_LOG_BASE", folder.join("log"))
            .env("RABBITMQ_PID_FILE", folder.join("pid"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", folder.join("plugins"))
            .env("RABBITMQ_CONFIG_FILE", folder.join("rabbitmq.conf"))
            .env("RABBITMQ_CONF_ENV_FILE", "/dev/null")
            .env(
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
                // Distribution on loopback only; idle schedulers do not burn the other tests' CPU;
                // and what tierline advises for its delays.
                "-kernel inet_dist_use_interface {127,0,0,1} +sbwt none +sbwtdcpu none +sbwtdio none \
                 -rabbit dead_letter_worker_publisher_confirm_timeout 10000",
            )
            // The script then replaces itself by the broker, so that signals reach the broker.
            .env("RUNNING_UNDER_SYSTEMD", "true")
            .env_remove("NOTIFY_SOCKET");
        command
    }

    fn output(&self) -> std::path::PathBuf {
        self.path("output.log")
    }

    fn path(&self, inside: &str) -> std::path::PathBuf {
        self.family.folder.path().join(&self.name).join(inside)
    }

    /// Waits until the node takes connections, which is a moment before [`Node::start`] ends.
    pub async fn until_accepting(&self) -> Result<()> {
        until("accepting connections", START_LIMIT, async || {
            Ok(self.accepts_connections().await)
        })
        .await
    }

    /// Speaks the first words of AMQP: a listening port alone may belong to a node that is not
    /// ready for clients yet.
    async fn accepts_connections(&self) -> bool {
        let greeting = async {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.amqp.number())).await?;
            stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
            stream.read_u8().await
        };
        let answer = tokio::time::timeout(Duration::from_secs(2), greeting).await;
        matches!(answer, Ok(Ok(1)))
    }
}
