//! Ports that no other testbed on this machine takes.
//!
//! Binding to port 0 and letting go again is a race: the number comes from the range that outgoing
//! connections use, and it must still be free when a killed server comes back minutes later. So
//! ports are taken from below that range, and a locked file marks each as ours until we are gone.

use std::fs::{self, File};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

use anyhow::{Context, Result, bail};

const FIRST: u16 = 20_000;
const LAST: u16 = 31_999;

/// A port of 127.0.0.1 that stays reserved as long as this value lives.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    // Dropping the file releases its lock; the kernel does it when the process dies.
    _lock: File,
}

impl Port {
    pub(crate) fn reserve() -> Result<Port> {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let folder = std::env::temp_dir().join(format!(
            "tierline-ports-{}",
            rustix::process::getuid().as_raw()
        ));
        fs::create_dir_all(&folder)
            .with_context(|| format!("could not create {}", folder.display()))?;

        let count = LAST - FIRST + 1;
        // Processes begin at different places, so that two rarely try the same port at once.
        let offset = (std::process::id().wrapping_mul(97) % u32::from(count)) as u16;
        for _ in 0..count {
            let step = NEXT.fetch_add(1, Ordering::Relaxed) % count;
            let number = FIRST + (offset + step) % count;
            let path = folder.join(number.to_string());
            let lock = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)
                .with_context(|| format!("could not open {}", path.display()))?;
            if lock.try_lock().is_ok() && TcpListener::bind(("127.0.0.1", number)).is_ok() {
                return Ok(Port {
                    number,
                    _lock: lock,
                });
            }
        }
        bail!("no free port between {FIRST} and {LAST} on 127.0.0.1")
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}
