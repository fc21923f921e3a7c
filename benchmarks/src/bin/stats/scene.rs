//! An app in which much waits.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use futures_util::{StreamExt, stream};
use serde_json::json;
use sqlx::{AssertSqlSafe, PgPool};
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_benchmarks::folder;
use tierline_testbed::{Database, Vhost, database, management_url, vhost};

/// Tasks of each tier.
const TASKS: usize = 4;

const TIERS: &str = r#"
app = "bench"
[tiers.critical]
queue = "classic"
slo = "5s"
[tiers.high]
queue = "classic"
slo = "30s"
[tiers.normal]
queue = "quorum"
slo = "2m"
[tiers.mail]
queue = "postgres"
slo = "30s"
[tiers.reports]
queue = "postgres"
slo = "10m"
[tiers.bulk]
queue = "postgres"
[groups.urgent]
tiers = ["critical", "high"]
concurrency = 8
[groups.normal]
tiers = ["normal", "mail"]
concurrency = 8
order = "strict"
[groups.deferred]
tiers = ["reports", "bulk"]
concurrency = 8
[tasks]
"#;

const QUEUES: [&str; 3] = ["critical", "high", "normal"];
const ROWS: [&str; 3] = ["mail", "reports", "bulk"];

pub(crate) struct Scene {
    pub(crate) app: Tierline,
    /// The file with the map.
    pub(crate) map: PathBuf,
    pool: PgPool,
    vhost: Vhost,
    database: Database,
}

impl Scene {
    pub(crate) async fn set() -> Result<Self> {
        let (vhost, database) = tokio::join!(vhost(), database());
        let tiers = QUEUES.into_iter().chain(ROWS);
        let tasks = tiers.flat_map(|tier| {
            (0..TASKS).map(move |number| format!("\"{tier}.task_{number}\" = \"{tier}\"\n"))
        });
        let map = format!("{TIERS}{}", tasks.collect::<String>());
        let app = Tierline::builder(Topology::parse(&map)?)
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .connect()
            .await?;
        std::fs::create_dir_all(folder())?;
        let file = folder().join("stats.toml");
        std::fs::write(&file, &map)?;
        // Gives the tiers their numbers.
        for tier in ROWS {
            app.publish_named(&format!("{tier}.task_0"), &json!({}))
                .await?;
        }
        Ok(Self {
            pool: PgPool::connect(database.url()).await?,
            app,
            map: file,
            vhost,
            database,
        })
    }

    pub(crate) fn amqp_url(&self) -> &str {
        self.vhost.amqp_url()
    }

    pub(crate) fn database_url(&self) -> &str {
        self.database.url()
    }

    pub(crate) fn management_url(&self) -> String {
        management_url(self.vhost.amqp_url())
    }

    /// So many messages in queues and so many rows, and a day of rollups.
    pub(crate) async fn fill(&self, number: u64) -> Result<()> {
        let rows = number / 10;
        // Seven of ten are ready, in ten priorities of one tier and one of another; the others are parked and due later.
        let insert = |table: &str, tier: &str, rows: u64, rank: &str, due: &str| {
            let (lane, of_lane) = match table {
                "parked" => ("lane, ", "1, "),
                _ => ("", ""),
            };
            format!(
                "INSERT INTO tierline.{table} ({lane}id, due_at, backlog, rank, task, payload) \
                 SELECT {of_lane}gen_random_uuid(), now() + {due}, id, {rank}, '{tier}.task_0', \
                    convert_to('{{\"customer\": ' || number || '}}', 'UTF8') \
                 FROM tierline.backlogs, generate_series(1, {rows}) AS number WHERE app = 'bench' AND tier = '{tier}'"
            )
        };
        let past = "- number * interval '1 millisecond'";
        for statement in [
            insert("ready", "mail", rows * 5, "-(number % 10)", past),
            insert("ready", "bulk", rows * 2, "0", past),
            insert("parked", "reports", rows * 2, "0", past),
            insert(
                "scheduled",
                "bulk",
                rows,
                "0",
                "+ number * interval '1 second'",
            ),
            rollups(),
        ] {
            sqlx::query(AssertSqlSafe(statement))
                .execute(&self.pool)
                .await?;
        }
        let requests = (0..number).map(|number| {
            let tier = QUEUES[usize::try_from(number).unwrap_or_default() % QUEUES.len()];
            PublishRequest::named(
                format!("{tier}.task_0"),
                json!({ "order": number }).to_string().into_bytes(),
            )
        });
        let mut published = Box::pin(self.app.publish_many(stream::iter(requests)));
        let mut stored = 0;
        while let Some(receipt) = published.next().await {
            receipt?;
            stored += 1;
        }
        ensure!(stored == number, "{stored} were published");
        Ok(())
    }
}

/// A day of each task, minute by minute.
fn rollups() -> String {
    let tasks: Vec<String> = QUEUES
        .into_iter()
        .chain(ROWS)
        .flat_map(|tier| {
            (0..TASKS).map(move |number| format!("('{tier}', '{tier}.task_{number}')"))
        })
        .collect();
    format!(
        "INSERT INTO tierline.rollups SELECT 'bench', date_trunc('minute', now()) - minute * interval '1 minute', tier, task, \
            60, 0, 0, 0, 60, 59, 0, 0, 0, 0, 1, 0, 59, 60, false, 60000000, 60000000, \
            '{{0,0,0,10,20,20,10}}', '{{0,0,0,0,10,20,20,10}}' \
         FROM (VALUES {}) AS mapped (tier, task), generate_series(1, 1440) AS minute",
        tasks.join(", ")
    )
}
