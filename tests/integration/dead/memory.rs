//! How much memory a worker takes that collects large dead letters.

use std::process::Stdio;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::options::BasicPublishOptions;
use tierline::dead::Filter;
use tierline::{Registry, Tierline, Topology};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::support::{Letter, MAP, Shop};

/// The broker of a worker that this program is to be, instead of the tests; and its database.
const BROKER: &str = "TIERLINE_TEST_WORKER_AMQP";
const DATABASE: &str = "TIERLINE_TEST_WORKER_POSTGRES";
/// The limit for a worker.
const LIMIT: u64 = 150 << 20;
const MIB: usize = 1 << 20;

/// A process of its own that works for the shop until it is killed.
struct Worker(Child);

impl Worker {
    async fn start(shop: &Shop) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "dead::memory::a_worker_of_its_own",
                "--exact",
                "--nocapture",
            ])
            .env(BROKER, shop.vhost.amqp_url())
            .env(DATABASE, shop.database.url())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        Self(command.spawn().unwrap())
    }

    /// The most memory that it ever had, in bytes.
    fn peak(&self) -> u64 {
        let id = self.0.id().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = peak.unwrap().trim().trim_end_matches(" kB");
        kibibytes.parse::<u64>().unwrap() << 10
    }

    /// Waits until it has collected so many.
    async fn until_collected(&mut self, count: u64) {
        let output = BufReader::new(self.0.stdout.take().unwrap());
        let mut lines = output.lines();
        let mut collected = 0;
        while collected < count {
            let reading = tokio::time::timeout(Duration::from_secs(300), lines.next_line());
            let line = reading.await.unwrap().unwrap().unwrap();
            if let Some(more) = line.strip_prefix("collected ") {
                collected += more.parse::<u64>().unwrap();
            }
        }
    }
}

/// The worker of these tests; among the tests it does nothing.
#[test]
fn a_worker_of_its_own() {
    let setting = |name| std::env::var(name).ok();
    let (Some(amqp), Some(postgres)) = (setting(BROKER), setting(DATABASE)) else {
        return;
    };
    let working = async {
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(amqp)
            .postgres(postgres)
            .registry(Registry::new())
            .observe(|event| {
                if let tierline::observe::Event::Collected { count, .. } = event {
                    println!("collected {count}");
                }
            })
            .connect()
            .await
            .unwrap();
        app.work(["all"]).until_terminated().await.unwrap();
    };
    tokio::runtime::Runtime::new().unwrap().block_on(working);
}

/// JSON of so many bytes that cannot be compressed.
fn json(bytes: usize) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_";
    let mut state: u64 = 1;
    let digits = (2..bytes).map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        DIGITS[(state >> 58) as usize]
    });
    [b'"'].into_iter().chain(digits).chain([b'"']).collect()
}

async fn die(shop: &Shop, tiers: &[&str], numbers: std::ops::Range<usize>, bytes: usize) {
    let payload = json(bytes);
    let mut confirms = FuturesUnordered::new();
    for number in numbers {
        let id = format!("ship-{number}");
        let letter = Letter {
            id: &id,
            ..Letter::default()
        };
        let exchange = format!("shop.{}.dlx", tiers[number % tiers.len()]);
        let options = BasicPublishOptions::default();
        let sending = shop.channel.basic_publish(
            exchange.into(),
            "".into(),
            options,
            &payload,
            letter.properties(),
        );
        confirms.push(sending.await.unwrap());
        if confirms.len() >= 16 {
            confirms.next().await.unwrap().unwrap();
        }
    }
    while let Some(confirmed) = confirms.next().await {
        confirmed.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_collects_large_dead_letters_of_several_queues_in_bounded_memory() {
    let count: usize = match std::env::var("TIERLINE_TEST_LETTERS") {
        Ok(count) => count.parse().unwrap(),
        Err(_) => 300,
    };
    let shop = Shop::open().await;
    // Small ones first: a bound that is learnt from them would not hold for what follows.
    die(&shop, &["normal"], 0..2_000, 100).await;
    die(&shop, &["normal", "critical"], 2_000..2_000 + count, MIB).await;
    let mut worker = Worker::start(&shop).await;
    worker.until_collected(2_000 + count as u64).await;
    let peak = worker.peak();
    worker.0.kill().await.unwrap();
    println!("{count} dead letters of 1 MiB: {} MiB at most", peak >> 20);
    let logged = shop.letters.count(&Filter::default()).await.unwrap();
    assert_eq!(logged, 2_000 + count as u64);
    assert!(peak < LIMIT, "{} MiB", peak >> 20);
}
