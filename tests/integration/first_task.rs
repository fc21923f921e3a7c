//! The first task of the guide, followed exactly: a new crate from its blocks alone. And the map of the README.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

const REPOSITORY: &str = env!("CARGO_MANIFEST_DIR");
/// The compiler may have much to do.
const PATIENCE: Duration = Duration::from_secs(900);

#[tokio::test]
async fn the_first_task_of_the_guide_runs() {
    let hotel = Hotel::from_the_guide();
    hotel.cargo(&["build"]).await.must_succeed();
    assert_eq!(
        hotel.first_line().await,
        "attempt 1: the code 1234 goes to +39 055 0000"
    );

    assert_eq!(
        hotel.error_without_a_database().await,
        "Error: cannot migrate the schema tierline in postgres://127.0.0.1:1/hotel: no connection: connection refused; is \
         Postgres running, and is this its address?\n\nCaused by:\n    Connection refused (os error 111)\n"
    );

    let tests = hotel.cargo(&["test"]).await.must_succeed();
    assert!(tests.contains("every_task_is_mapped ... ok"), "{tests}");
    hotel.forget(r#""sms.send_otp" = "critical""#);
    let tests = hotel.cargo(&["test"]).await.must_fail();
    assert!(tests.contains("1 task is not mapped to a tier"), "{tests}");
}

#[test]
fn the_map_of_the_readme_has_the_task_of_its_example() {
    let readme = page("README.md");
    let topology = tierline::Topology::parse(block(&readme, "# topology.toml")).unwrap();
    assert_eq!(topology.task("sms.send_otp").unwrap().tier, "critical");
    assert_eq!(topology.groups().len(), 2);
    assert_eq!(topology.broker_tiers().count(), 0, "it needs no broker");
}

fn page(path: &str) -> String {
    std::fs::read_to_string(Path::new(REPOSITORY).join(path)).unwrap()
}

/// The code block that begins with this line.
fn block<'p>(page: &'p str, title: &str) -> &'p str {
    let mut blocks = page.split("\n```").filter_map(|part| part.split_once('\n'));
    let found = blocks.find_map(|(_, block)| block.strip_prefix(title)?.strip_prefix('\n'));
    found.unwrap_or_else(|| panic!("the page has no block {title:?}"))
}

/// The crate of a reader who copies the blocks of the guide.
struct Hotel {
    folder: PathBuf,
}

impl Hotel {
    fn from_the_guide() -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("first_task");
        std::fs::create_dir_all(folder.join("src")).unwrap();
        let hotel = Self { folder };
        let guide = page("src/guide/your_first_task.md");
        let block = |title: &str| block(&guide, title);
        let manifest = block("# Cargo.toml").replace("../tierline", REPOSITORY);
        // The reader's crate is beside the clone. Ours is inside it, and no member of its workspace.
        hotel.write("Cargo.toml", &format!("{manifest}\n[workspace]\n"));
        hotel.write("topology.toml", block("# topology.toml"));
        let program = [block("// src/main.rs"), block("// src/main.rs, at its end")];
        hotel.write("src/main.rs", &program.join("\n"));
        // The same versions as everything else here, so that nothing need be fetched.
        let lock = Path::new(REPOSITORY).join("Cargo.lock");
        std::fs::copy(lock, hotel.folder.join("Cargo.lock")).unwrap();
        hotel
    }

    fn write(&self, file: &str, content: &str) {
        std::fs::write(self.folder.join(file), content).unwrap();
    }

    fn forget(&self, line: &str) {
        let map = std::fs::read_to_string(self.folder.join("topology.toml")).unwrap();
        assert!(map.contains(line));
        self.write("topology.toml", &map.replace(line, ""));
    }

    /// Where all tests of this repository are built: most of what it depends on is there already.
    fn target(&self) -> &Path {
        Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap()
    }

    async fn cargo(&self, arguments: &[&str]) -> Ended {
        let begin = Instant::now();
        let running = Command::from(tierline_testbed::cargo())
            .current_dir(&self.folder)
            .args(arguments)
            .args(["--offline", "--target-dir"])
            .arg(self.target())
            // As the dependencies are built here: else none of them would be there already.
            .env("CARGO_PROFILE_DEV_DEBUG", "false")
            .kill_on_drop(true)
            .output();
        let output = timeout(PATIENCE, running).await.unwrap().unwrap();
        println!("cargo {arguments:?} took {:?}", begin.elapsed());
        Ended(output)
    }

    /// What the program says where nobody listens.
    async fn error_without_a_database(&self) -> String {
        let running = Command::new(self.target().join("debug/hotel"))
            .current_dir(&self.folder)
            .env("DATABASE_URL", "postgres://ada:secret@127.0.0.1:1/hotel")
            .env_remove("RUST_BACKTRACE")
            .kill_on_drop(true)
            .output();
        let ended = timeout(PATIENCE, running).await.unwrap().unwrap();
        assert!(!ended.status.success());
        String::from_utf8(ended.stderr).unwrap()
    }

    /// Runs the program on a database of its own until it has printed a line, then asks it to end.
    async fn first_line(&self) -> String {
        let database = tierline_testbed::database().await;
        let mut program = Command::new(self.target().join("debug/hotel"))
            .current_dir(&self.folder)
            .env("DATABASE_URL", database.url())
            .env_remove("AMQP_URL")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
        let id = program.id().unwrap().to_string();
        let asked = Command::new("kill").args(["-TERM", &id]).status();
        assert!(asked.await.unwrap().success());
        let ended = timeout(PATIENCE, program.wait()).await.unwrap().unwrap();
        assert!(ended.success(), "{ended}");
        line.unwrap()
    }
}

/// A command that has ended.
struct Ended(Output);

impl Ended {
    fn must_succeed(self) -> String {
        assert!(self.0.status.success(), "{}", self.text());
        self.text()
    }

    fn must_fail(self) -> String {
        assert!(!self.0.status.success(), "{}", self.text());
        self.text()
    }

    fn text(&self) -> String {
        let printed = [&self.0.stdout, &self.0.stderr];
        printed.map(|bytes| String::from_utf8_lossy(bytes)).concat()
    }
}
