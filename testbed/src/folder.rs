//! Where servers keep their data: a folder of its own for every server, gone when it is dropped.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::guard;

/// Set to any value, the folders of servers (with their logs) are kept for a look afterwards.
pub const KEEP: &str = "TIERLINE_KEEP";

/// A new folder that is removed on drop, and by the guard when this process dies.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Folder {
    /// A folder under the build's `target/testbed`.
    pub(crate) fn create(purpose: &str) -> Result<Folder> {
        Folder::create_in(&target().join("testbed"), purpose)
    }

    /// A folder that other users can reach: Postgres refuses to run as root, and a user that it
    /// can run as may not enter a checkout below `/root`.
    pub(crate) fn create_reachable(purpose: &str) -> Result<Folder> {
        let preferred = target().join("testbed");
        fs::create_dir_all(&preferred)
            .with_context(|| format!("could not create {}", preferred.display()))?;
        let reachable = preferred.ancestors().all(|ancestor| {
            fs::metadata(ancestor).is_ok_and(|metadata| metadata.mode() & 0o001 != 0)
        });
        if reachable {
            Folder::create_in(&preferred, purpose)
        } else {
            Folder::create_in(&std::env::temp_dir().join("tierline-testbed"), purpose)
        }
    }

    fn create_in(base: &Path, purpose: &str) -> Result<Folder> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        fs::create_dir_all(base).with_context(|| format!("could not create {}", base.display()))?;
        remove_abandoned(base);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("{purpose}-{}-{number}", std::process::id()));
        let lock = create_locked(&path)
            .with_context(|| format!("could not create and lock {}", path.display()))?;
        if !keep() {
            guard::remove(&path)?;
        }
        Ok(Folder { path, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if keep() {
            eprintln!("kept {}", self.path.display());
        } else {
            // What cannot be removed now is removed by the guard or the next run.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Creates a folder with a lock file that this process holds.
fn create_locked(path: &Path) -> io::Result<File> {
    loop {
        fs::create_dir_all(path)?;
        let file = match File::create(path.join("lock")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            created => created?,
        };
        file.lock()?;
        // Another process may have taken the folder for an abandoned one, and removed it, in the
        // moment between the file and its lock.
        if path.join("lock").exists() {
            return Ok(file);
        }
    }
}

/// The `target` folder of the build that this code is part of.
pub fn target() -> PathBuf {
    // The binary is target/<profile>/…, target/<profile>/deps/… or target/<profile>/examples/….
    std::env::current_exe()
        .ok()
        .and_then(|executable| {
            executable
                .ancestors()
                .find(|folder| folder.join("CACHEDIR.TAG").exists())
                .map(Path::to_path_buf)
        })
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"))
}

/// Waits until the servers of processes that were killed are gone too: their guards remove the
/// folders last. At most ten seconds, and at most one for folders that somebody still holds: another
/// run may be at work in the same checkout.
pub fn wait_until_clean() {
    let base = target().join("testbed");
    let begin = Instant::now();
    loop {
        let waited = begin.elapsed();
        let is_awaited =
            |folder: &Path| waited < Duration::from_secs(1) || lock_abandoned(folder).is_some();
        let mut folders = fs::read_dir(&base).into_iter().flatten().flatten();
        let is_clean = !folders.any(|folder| is_awaited(&folder.path()));
        if is_clean || keep() || waited > Duration::from_secs(10) {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The lock of a folder whose owner is gone; `None` where somebody holds it.
fn lock_abandoned(folder: &Path) -> Option<File> {
    // A folder without a lock file was created this very moment by somebody else.
    let lock = File::open(folder.join("lock")).ok()?;
    lock.try_lock().is_ok().then_some(lock)
}

fn keep() -> bool {
    std::env::var_os(KEEP).is_some()
}

/// Removes folders whose owner is gone.
fn remove_abandoned(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else {
        return;
    };
    for entry in entries.flatten() {
        // Held while it is removed, so that nobody takes the folder meanwhile.
        let lock = lock_abandoned(&entry.path());
        if lock.is_some() && !keep() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
