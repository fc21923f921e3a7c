//! Which RabbitMQ: the one that the machine has, or the newest that Debian has, unpacked into the
//! user's cache and run in a chroot.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::process;
use crate::provide::{self, is_root};

/// Chooses the broker: `newest`, or unset for what the machine has.
pub const WHICH: &str = "TIERLINE_RABBITMQ";

const SCRIPTS: &str = "usr/lib/rabbitmq/bin";

/// The Debian suites that have a newer broker than the machine may have, newest first.
const SUITES: [&str; 2] = ["sid", "trixie"];

/// An unpacked RabbitMQ that nodes can be started from.
#[derive(Clone, Debug)]
pub struct Release {
    version: String,
    /// The folder of `rabbitmq-server` and `rabbitmqctl`, as seen from inside `root`.
    scripts: PathBuf,
    /// The file system that it runs in, where that is not the machine's own.
    root: Option<PathBuf>,
}

impl Release {
    /// The release that [`WHICH`] asks for, if it is on this machine already.
    pub fn find() -> Result<Release> {
        let found = if wants_newest()? {
            newest_at_hand()
        } else {
            on_this_machine()
        };
        found.context(
            "RabbitMQ is not on this machine: run `cargo xtask test`, which installs it where it \
             may, or install the package rabbitmq-server",
        )
    }

    /// Whether the machine's own RabbitMQ is asked for and not there.
    pub(crate) fn is_missing() -> Result<bool> {
        Ok(!wants_newest()? && on_this_machine().is_none())
    }

    /// Like [`Release::find`], but unpacks the newest if that is asked for, saying so first.
    pub(crate) async fn provide() -> Result<Release> {
        if !wants_newest()? {
            return Release::find();
        }
        if let Some(own) = on_this_machine().filter(Release::is_newest) {
            return Ok(own);
        }
        for suite in SUITES {
            match unpack(suite).await {
                Ok(release) if release.is_newest() => return Ok(release),
                Ok(release) => {
                    eprintln!(
                        "RabbitMQ 4.3 or later cannot be had here; using {} instead",
                        release.version
                    );
                    return Ok(release);
                }
                Err(error) => eprintln!("no RabbitMQ from Debian {suite}: {error:#}"),
            }
        }
        bail!(
            "{WHICH}=newest needs root on a Debian or Ubuntu with its packages within reach; unset \
             it to use the RabbitMQ of this machine"
        )
    }

    /// As the package says it, such as `3.10.8`.
    pub fn version(&self) -> &str {
        &self.version
    }

    fn is_newest(&self) -> bool {
        let mut parts = self
            .version
            .split('.')
            .map(|part| part.parse().unwrap_or(0));
        (parts.next(), parts.next()) >= (Some(4_u32), Some(3_u32))
    }

    /// A command that runs one of RabbitMQ's scripts and can reach `folder`.
    pub(crate) fn command(&self, script: &str, folder: &Path) -> Command {
        let script = self.scripts.join(script);
        let Some(root) = &self.root else {
            return Command::new(script);
        };
        // The mounts live in a namespace that ends with the process, so none is left behind.
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "/bin/sh", "-ec"]);
        command.arg(
            r#"root=$1; folder=$2; shift 2
            mount --bind /proc "$root/proc"
            mount --rbind /dev "$root/dev"
            mkdir -p "$root$folder"
            mount --bind "$folder" "$root$folder"
            exec chroot "$root" "$@""#,
        );
        command.arg("sh").arg(root).arg(folder).arg(script);
        command
    }

    /// A command for the port mapper of this release's Erlang.
    pub(crate) fn epmd(&self, port: u16) -> Command {
        let mut command = match &self.root {
            None => Command::new("epmd"),
            Some(root) => {
                let mut command = Command::new("chroot");
                command.arg(root).arg("epmd");
                command
            }
        };
        command.args(["-address", "127.0.0.1", "-port", &port.to_string()]);
        command
    }
}

fn wants_newest() -> Result<bool> {
    match std::env::var(WHICH).as_deref() {
        Err(_) | Ok("") => Ok(false),
        Ok("newest") => Ok(true),
        Ok(other) => bail!(
            "{WHICH} is \"{other}\": it can be \"newest\", or unset for the broker of this machine"
        ),
    }
}

fn on_this_machine() -> Option<Release> {
    // The command on the PATH may be Debian's wrapper, which switches to the user `rabbitmq`.
    let from_path = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    std::iter::once(Path::new("/").join(SCRIPTS))
        .chain(from_path.filter_map(|folder| {
            let script = fs::canonicalize(folder.join("rabbitmq-server")).ok()?;
            let text = fs::read_to_string(&script).ok()?;
            let is_wrapper = text.contains("su rabbitmq") || text.contains("runuser");
            (!is_wrapper).then(|| script.parent().map(Path::to_path_buf))?
        }))
        .find(|scripts| scripts.join("rabbitmq-server").exists())
        .map(|scripts| Release {
            version: version_at(&scripts).unwrap_or_else(|| "unknown".to_owned()),
            scripts,
            root: None,
        })
}

/// The version is part of the name of the folder that the scripts use.
fn version_at(scripts: &Path) -> Option<String> {
    let prefix = "rabbitmq_server-";
    let inside = [scripts.join("../lib"), scripts.join("../..")];
    inside
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flat_map(|entries| entries.flatten())
        .find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            name.strip_prefix(prefix).map(str::to_owned)
        })
}

fn newest_at_hand() -> Option<Release> {
    let own = on_this_machine().filter(Release::is_newest);
    own.or_else(|| SUITES.iter().find_map(|suite| unpacked(suite)))
}

fn cache() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME says where a RabbitMQ could be unpacked")?;
    Ok(base.join("tierline"))
}

fn unpacked(suite: &str) -> Option<Release> {
    let root = cache().ok()?.join(format!("rabbitmq-{suite}"));
    let scripts = root.join(SCRIPTS);
    scripts.join("rabbitmq-server").exists().then(|| Release {
        version: version_at(&scripts).unwrap_or_else(|| "unknown".to_owned()),
        scripts: Path::new("/").join(SCRIPTS),
        root: Some(root),
    })
}

/// Unpacks Debian's `suite` with RabbitMQ into the cache, once for all checkouts.
async fn unpack(suite: &str) -> Result<Release> {
    if let Some(release) = unpacked(suite) {
        return Ok(release);
    }
    if !is_root() {
        bail!("unpacking it needs root");
    }
    if !provide::on_path("debootstrap") {
        provide::packages(&["debootstrap"]).await?;
    }
    let cache = cache()?;
    fs::create_dir_all(&cache).with_context(|| format!("could not create {}", cache.display()))?;
    let limit = Duration::from_secs(600);
    let _alone = lock(&cache.join(format!("rabbitmq-{suite}.lock")), limit).await?;
    if let Some(release) = unpacked(suite) {
        return Ok(release);
    }

    let finished = cache.join(format!("rabbitmq-{suite}"));
    let partial = cache.join(format!("rabbitmq-{suite}.partial"));
    if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    eprintln!(
        "unpacking RabbitMQ from Debian {suite} into {} (once, about a minute)",
        finished.display()
    );
    let mut command = Command::new("debootstrap");
    command.args(["--variant=minbase", "--include=rabbitmq-server", suite]);
    command.arg(&partial);
    process::run(command, limit).await?;
    // Inside the chroot `localhost` must resolve as it does outside.
    fs::copy("/etc/hosts", partial.join("etc/hosts"))?;
    fs::rename(&partial, &finished)?;
    unpacked(suite).context("Debian's package has no rabbitmq-server script")
}

async fn lock(path: &Path, limit: Duration) -> Result<File> {
    let file = File::create(path).with_context(|| format!("could not open {}", path.display()))?;
    let deadline = Instant::now() + limit;
    while file.try_lock().is_err() {
        if Instant::now() > deadline {
            bail!(
                "{} was held by another process for {limit:?}",
                path.display()
            );
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(file)
}
