//! Ends what this process started, however this process itself ends.
//!
//! Destructors do not run after `kill -9`, Ctrl-C, an abort or `process::exit`, and statics never
//! have theirs run. So the first server that is started also starts a small shell beside this
//! process, in a process group of its own so that Ctrl-C does not reach it. It reads what to clean
//! up from a pipe whose other end only this process holds. When the pipe closes, this process is
//! gone, and the shell ends every process group that is still on its list and removes the folders.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Context, Result};
use rustix::process::Signal;

/// How a process group is ended when its owner is gone.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// `SIGKILL`: for servers whose data is thrown away anyway.
    Kill,
    /// `SIGQUIT`: Postgres' immediate shutdown, which also releases its shared memory.
    Quit,
    /// `SIGTERM`: for a program that has something of its own to clean up.
    Terminate,
}

impl End {
    pub(crate) fn signal(self) -> Signal {
        match self {
            End::Kill => Signal::KILL,
            End::Quit => Signal::QUIT,
            End::Terminate => Signal::TERM,
        }
    }
}

// The last KILL is for a group that was asked to quit and is stopped (SIGSTOP) or stuck.
const SCRIPT: &str = r#"
trap '' INT TERM HUP QUIT
groups='' ; folders=''
while read -r verb signal rest; do
    case $verb in
    watch) groups="$groups $signal:$rest" ;;
    forget)
        kept=''
        for entry in $groups; do
            [ "${entry#*:}" = "$rest" ] || kept="$kept $entry"
        done
        groups=$kept
        ;;
    remove) folders="$folders
$rest" ;;
    esac
done
for entry in $groups; do kill -"${entry%%:*}" -- "-${entry#*:}" 2>/dev/null; done
for attempt in 1 2 3 4 5 6 7 8 9 10; do
    alive=''
    for entry in $groups; do kill -s 0 -- "-${entry#*:}" 2>/dev/null && alive=yes; done
    [ -z "$alive" ] && break
    sleep 0.3
done
for entry in $groups; do kill -s KILL -- "-${entry#*:}" 2>/dev/null; done
printf '%s\n' "$folders" | while read -r folder; do
    [ -n "$folder" ] && rm -rf -- "$folder"
done
"#;

/// Puts a process group on the list.
pub(crate) fn watch(group: u32, end: End) -> Result<()> {
    tell(&format!("watch {} {group}", end.signal().as_raw()))
}

/// Takes a process group off the list, once its leader has been reaped: from then on the number
/// may belong to somebody else.
pub(crate) fn forget(group: u32) -> Result<()> {
    tell(&format!("forget - {group}"))
}

/// Has a folder removed after all processes have ended.
pub(crate) fn remove(folder: &Path) -> Result<()> {
    tell(&format!("remove - {}", folder.display()))
}

fn tell(line: &str) -> Result<()> {
    static GUARD: OnceLock<Mutex<Option<ChildStdin>>> = OnceLock::new();
    let mut guard = GUARD
        .get_or_init(|| Mutex::new(None))
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let pipe = match guard.take() {
        Some(pipe) => pipe,
        None => start()?,
    };
    let pipe = guard.insert(pipe);
    writeln!(pipe, "{line}").context("the clean-up process of the testbed is gone")
}

fn start() -> Result<ChildStdin> {
    let mut child = Command::new("/bin/sh")
        .args(["-c", SCRIPT])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context("could not start /bin/sh, which cleans up after the servers of the testbed")?;
    child
        .stdin
        .take()
        .context("the clean-up process has no pipe")
}
