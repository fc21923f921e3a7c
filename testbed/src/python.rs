//! Python in an environment of its own, for producers in another language.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::folder::Folder;
use crate::{process, provide};

const INSTALL_LIMIT: Duration = Duration::from_secs(300);
const RUN_LIMIT: Duration = Duration::from_secs(300);

/// A virtual environment with some packages, removed when this value is dropped.
#[derive(Debug)]
pub struct Python {
    folder: Folder,
}

impl Python {
    /// An environment with the packages of a `requirements.txt`. Python itself is installed first
    /// where it is missing and that is allowed.
    pub async fn with(requirements: &Path) -> Result<Python> {
        let mut check = Command::new("python3");
        check.args(["-c", "import ensurepip, venv"]);
        if process::run(check, RUN_LIMIT).await.is_err() {
            provide::packages(&["python3", "python3-venv"])
                .await
                .context("the test of the Python producer needs python3 with its module venv")?;
        }
        let python = Python {
            folder: Folder::create("python")?,
        };
        let mut create = Command::new("python3");
        create.args(["-m", "venv"]).arg(python.folder.path());
        process::run(create, INSTALL_LIMIT).await?;
        let mut install = Command::new(python.program());
        install.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]);
        install.arg("--requirement").arg(requirements);
        process::run(install, INSTALL_LIMIT)
            .await
            .context("pip could not install the packages: is the package index reachable?")?;
        Ok(python)
    }

    /// Runs a script, and gives what it printed.
    pub async fn run(&self, script: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.program());
        command.arg(script).args(arguments);
        process::run(command, RUN_LIMIT).await
    }

    /// The interpreter of this environment.
    pub fn program(&self) -> PathBuf {
        self.folder.path().join("bin").join("python")
    }
}
