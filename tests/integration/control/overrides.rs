//! Tasks that an operator sends to another tier, or gives another priority, for a while.

use std::sync::{Arc, Mutex};

use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tierline::control::{Control, Overriding, Setting, Target};
use tierline::dead::{Filter, Page};
use tierline::task::PublishRequest;
use tierline::{Builder, Context, Error, Outcome, Registry, Task, TaskError, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::Semaphore;

use super::{Working, until, work_in};
use crate::worker::Heard;

const MAP: &str = r#"
    app = "shop"
    [tiers.high]
    queue = "classic"
    [tiers.rows]
    queue = "postgres"
    max_priority = 5
    lease = "2s"
    [tiers.low]
    queue = "quorum"
    [tiers.bulk]
    queue = "postgres"
    lease = "2s"
    [tiers.fresh]
    queue = "postgres"
    ttl = "1h"
    [tiers.plain]
    queue = "classic"
    delays = false
    [tiers.idle]
    queue = "postgres"
    [groups.urgent]
    tiers = ["high", "rows"]
    concurrency = 2
    [groups.slow]
    tiers = ["low", "bulk", "fresh", "plain"]
    concurrency = 2
    [groups.nobody]
    tiers = ["idle"]
    concurrency = 1
    [tasks]
    "report.export" = "high"
    "report.send" = "rows"
    "mail.send" = "rows"
    "sms.send" = "rows"
"#;

macro_rules! task {
    ($type:ident, $name:literal) => {
        #[derive(Debug, Serialize, Deserialize)]
        struct $type {
            number: u32,
        }

        impl Task for $type {
            const NAME: &'static str = $name;
        }
    };
}

task!(Export, "report.export");
task!(Send, "report.send");
task!(Mail, "mail.send");

/// The task, attempt and tier of each run.
type Runs = Arc<Mutex<Vec<(&'static str, u32, String)>>>;

/// Handlers for all tasks but `sms.send`. A first attempt waits for the gate and ends as `first` says.
fn registry(first: fn() -> Outcome, gate: &Arc<Semaphore>) -> (Registry, Runs) {
    let runs = Runs::default();
    let mut registry = Registry::new();
    let (noted, gate) = (runs.clone(), gate.clone());
    let run = move |cx: Context| {
        let (runs, gate) = (noted.clone(), gate.clone());
        async move {
            let run = (cx.task(), cx.attempt(), cx.tier().to_owned());
            runs.lock().unwrap().push(run);
            if cx.attempt() > 1 {
                return Outcome::Done;
            }
            let _open = gate.acquire().await.unwrap();
            first()
        }
    };
    let own = run.clone();
    registry
        .register::<Export, _>(move |_: Export, cx: Context| own(cx))
        .unwrap();
    let own = run.clone();
    registry
        .register::<Send, _>(move |_: Send, cx: Context| own(cx))
        .unwrap();
    registry
        .register::<Mail, _>(move |_: Mail, cx: Context| run(cx))
        .unwrap();
    (registry, runs)
}

/// The servers of an app, and its first process, in which nothing works yet.
struct Shop {
    vhost: Vhost,
    database: Database,
    pool: PgPool,
    app: Tierline,
    control: Control,
    heard: Heard,
    runs: Runs,
    gate: Arc<Semaphore>,
}

impl Shop {
    async fn open() -> Self {
        let shop = Self::open_with(MAP, || Outcome::Done).await;
        shop.gate.add_permits(1);
        shop
    }

    /// First attempts wait until the gate is open.
    async fn open_with(map: &str, first: fn() -> Outcome) -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let heard = Heard::default();
        let gate = Arc::new(Semaphore::new(0));
        let (registry, runs) = registry(first, &gate);
        let app = Tierline::builder(Topology::parse(map).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .registry(registry)
            .observe(heard.ear())
            .connect()
            .await
            .unwrap();
        Self {
            pool: PgPool::connect(database.url()).await.unwrap(),
            control: app.control().unwrap().by("ada"),
            vhost,
            database,
            app,
            heard,
            runs,
            gate,
        }
    }

    /// Another process of the app.
    fn another(&self) -> Builder {
        Tierline::builder(self.app.topology().clone())
            .amqp(self.vhost.amqp_url())
            .postgres(self.database.url())
            .registry(Registry::new())
    }

    /// A worker that has handlers, and is known to the others.
    async fn work(&self, groups: &[&str]) -> Working {
        let before = self.control.processes().await.unwrap().len();
        let working = work_in(&self.app, groups.iter().copied());
        until(async || self.control.processes().await.unwrap().len() > before).await;
        working
    }

    /// A process that is known to serve the slow tiers, and takes nothing.
    async fn add_idle_worker(&self) {
        sqlx::query(
            "INSERT INTO tierline.workers (app, name, version, leases, groups, tasks) VALUES ('shop', 'idle:1', '', \
             '{\"bulk\": 600}', '[{\"name\": \"all\", \"slots\": 1, \"tiers\": [\"bulk\", \"rows\", \"fresh\"]}]', \
             '{report.export,report.send}')",
        )
        .execute(&self.pool)
        .await
        .unwrap();
    }

    /// The tier, the number and the priority of the rows of a task in one table, in the order of their tiers.
    async fn rows(&self, table: &str, task: &str) -> Vec<(String, i64, i16)> {
        let rows = format!(
            "SELECT tier, convert_from(payload, 'UTF8')::jsonb ->> 'number', -rank FROM tierline.{table} \
             JOIN tierline.backlogs ON backlogs.id = backlog WHERE task = $1 ORDER BY tier, rank, due_at, {table}.id"
        );
        let rows: Vec<(String, String, i16)> = sqlx::query_as(sqlx::AssertSqlSafe(rows))
            .bind(task)
            .fetch_all(&self.pool)
            .await
            .unwrap();
        let read = |(tier, number, priority): (String, String, i16)| {
            (tier, number.parse().unwrap(), priority)
        };
        rows.into_iter().map(read).collect()
    }

    /// Where the SQL function publishes a task, with which priority.
    async fn publish_by_sql(&self, task: &str, priority: Option<i32>) -> (String, i16) {
        let id: String = sqlx::query_scalar(
            "SELECT tierline.publish('shop', $1, '{\"number\": 7}', delay => '1h', priority => $2)",
        )
        .bind(task)
        .bind(priority)
        .fetch_one(&self.pool)
        .await
        .unwrap();
        assert!(!id.is_empty());
        sqlx::query_as(
            "WITH row AS (DELETE FROM tierline.scheduled RETURNING *) \
             SELECT tier, -rank FROM row JOIN tierline.backlogs ON backlogs.id = backlog",
        )
        .fetch_one(&self.pool)
        .await
        .unwrap()
    }
}

async fn tier_of(app: &Tierline, task: &str) -> String {
    let published = app.publish_named(task, &serde_json::json!({ "number": 1 }));
    published.await.unwrap().tier
}

async fn refusal(overriding: Overriding) -> String {
    match overriding.await.unwrap_err() {
        Error::Control(error) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_process_follows_an_override_and_its_end_however_it_publishes() {
    let shop = Shop::open().await;
    let other = shop.another().connect().await.unwrap();
    let working = shop.work(&["slow"]).await;
    assert_eq!(tier_of(&other, "report.export").await, "high");
    assert_eq!(
        shop.publish_by_sql("report.export", Some(9)).await.0,
        "high"
    );

    let control = &shop.control;
    let overriding = control.override_task("report.export").tier("bulk");
    let overridden = overriding
        .because("the quarter")
        .lasting("7d")
        .await
        .unwrap();
    assert_eq!((overridden.before.len(), overridden.after.len()), (0, 1));
    let entry = &overridden.after[0];
    assert_eq!(
        (entry.who.as_str(), entry.why.as_str()),
        ("ada", "the quarter")
    );
    assert!(entry.until.is_some());
    // What is published in SQL follows at once, and so does a process that begins now with its first publish.
    assert_eq!(
        shop.publish_by_sql("report.export", Some(9)).await,
        ("bulk".into(), 9)
    );
    let begun = shop.another().connect().await.unwrap();
    assert_eq!(tier_of(&begun, "report.export").await, "bulk");
    let begun = shop.another().connect_lazy().unwrap();
    assert_eq!(tier_of(&begun, "report.export").await, "bulk");
    let begun = shop.another().connect_lazy().unwrap();
    let request = PublishRequest::new(&Export { number: 2 }).unwrap();
    let published: Vec<_> = begun.publish_many(stream::iter([request])).collect().await;
    assert_eq!(published[0].as_ref().unwrap().tier, "bulk");
    let begun = shop.another().connect_lazy().unwrap();
    let mut transaction = shop.pool.begin().await.unwrap();
    let published = begun.publish(Export { number: 3 });
    let receipt = published.within(&mut transaction).await.unwrap();
    assert_eq!(receipt.tier, "bulk");
    transaction.commit().await.unwrap();
    for app in [&shop.app, &other] {
        until(async || tier_of(app, "report.export").await == "bulk").await;
    }
    assert_eq!(tier_of(&other, "report.send").await, "rows");

    // An override by a prefix counts where no task is named.
    let prefixed = control.override_prefix("report.").tier("low");
    assert_eq!(
        prefixed.await.unwrap().after[0].target,
        Target::Prefix("report.".into())
    );
    until(async || tier_of(&other, "report.send").await == "low").await;
    assert_eq!(tier_of(&other, "report.export").await, "bulk");
    let ended = control.end_override_task("report.export").await.unwrap();
    assert_eq!((ended.before.is_some(), ended.after), (true, None));
    until(async || tier_of(&other, "report.export").await == "low").await;
    assert_eq!(shop.publish_by_sql("report.export", None).await.0, "low");
    control.end_override_prefix("report.").await.unwrap();
    for app in [&shop.app, &other] {
        until(async || tier_of(app, "report.export").await == "high").await;
        until(async || tier_of(app, "report.send").await == "rows").await;
    }
    assert_eq!(
        shop.publish_by_sql("report.export", None).await,
        ("high".into(), 5)
    );

    let audit = control.audit_log(None, 10).await.unwrap();
    let actions: Vec<_> = audit.iter().map(|entry| entry.action.as_str()).collect();
    assert_eq!(
        actions,
        [
            "end override of prefix",
            "end override of task",
            "override prefix",
            "override task"
        ]
    );
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_override_of_a_list_ends_by_itself() {
    let shop = Shop::open().await;
    let working = shop.work(&["slow"]).await;
    let tasks = ["report.export", "mail.send"];
    let overridden = shop
        .control
        .override_tasks(tasks)
        .tier("bulk")
        .lasting("2s");
    assert_eq!(overridden.await.unwrap().after.len(), 2);
    let begun = shop.another().connect().await.unwrap();
    for task in tasks {
        assert_eq!(tier_of(&begun, task).await, "bulk");
    }
    until(async || tier_of(&begun, "report.export").await == "high").await;
    until(async || tier_of(&begun, "mail.send").await == "rows").await;
    until(async || shop.publish_by_sql("mail.send", None).await.0 == "rows").await;
    assert_eq!(shop.control.list().await.unwrap(), []);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn priorities_are_those_of_the_override_or_the_nearest_of_the_tier() {
    let shop = Shop::open().await;
    let working = shop.work(&["urgent", "slow"]).await;
    let control = &shop.control;
    control
        .override_task("mail.send")
        .priority(2)
        .await
        .unwrap();
    assert_eq!(
        shop.publish_by_sql("mail.send", Some(5)).await,
        ("rows".into(), 2)
    );
    control
        .override_task("report.export")
        .tier("rows")
        .await
        .unwrap();
    // It may ask for what its own tier has.
    assert_eq!(
        shop.publish_by_sql("report.export", Some(10)).await,
        ("rows".into(), 5)
    );
    control
        .override_task("report.send")
        .tier("low")
        .await
        .unwrap();
    assert_eq!(
        shop.publish_by_sql("report.send", Some(1)).await,
        ("low".into(), 4)
    );
    let overridden = control
        .override_task("report.send")
        .tier("bulk")
        .priority(9);
    let overridden = overridden.await.unwrap();
    assert_eq!(overridden.before.len(), 1);
    assert_eq!(
        shop.publish_by_sql("report.send", Some(1)).await,
        ("bulk".into(), 9)
    );
    // The library says the same as the function.
    let begun = shop.another().connect().await.unwrap();
    for (task, priority, tier, expected) in [
        ("mail.send", 5, "rows", 2),
        ("report.export", 10, "rows", 5),
        ("report.send", 1, "bulk", 9),
    ] {
        let publish = begun.publish_named(task, &serde_json::json!({ "number": 1 }));
        let receipt = publish.priority(priority).delay("1h").await.unwrap();
        assert_eq!(receipt.tier, tier);
        let rows = shop.rows("scheduled", task).await;
        assert_eq!(rows, [(tier.to_owned(), 1, expected)], "{task}");
    }
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_in_both_homes_follow_and_no_task_strays() {
    let failing = || Outcome::retry(TaskError::retry_after("1s", "not yet"));
    let shop = Shop::open_with(MAP, failing).await;
    let working = shop.work(&["urgent", "slow"]).await;
    shop.app.publish(Export { number: 1 }).await.unwrap();
    shop.app.publish(Send { number: 1 }).await.unwrap();
    shop.heard.until("started", 2).await;
    // While they run, they get a tier of the other home.
    let control = &shop.control;
    control
        .override_task("report.export")
        .tier("bulk")
        .await
        .unwrap();
    control
        .override_task("report.send")
        .tier("low")
        .await
        .unwrap();
    until(async || tier_of(&shop.app, "report.export").await == "bulk").await;
    until(async || tier_of(&shop.app, "report.send").await == "low").await;
    shop.gate.add_permits(1);
    until(async || {
        let runs = shop.runs.lock().unwrap();
        let of_tier = |tier: &str| runs.iter().filter(|run| run.2 == tier).count();
        // The first attempts of all that were published, and the second ones.
        shop.heard.count("done") * 2 == runs.len() && of_tier("low") > 2 && of_tier("bulk") > 2
    })
    .await;
    let runs = shop.runs.lock().unwrap().clone();
    for (task, own, other) in [
        ("report.export", "high", "bulk"),
        ("report.send", "rows", "low"),
    ] {
        let in_own = runs.iter().filter(|run| run.0 == task && run.2 == own);
        assert!(
            in_own.clone().count() >= 1 && in_own.clone().all(|run| run.1 == 1),
            "{runs:?}"
        );
        let mut others = runs.iter().filter(|run| run.0 == task && run.2 != own);
        assert!(others.all(|run| run.2 == other), "{runs:?}");
        let attempts = |attempt| {
            runs.iter()
                .filter(move |run| run.0 == task && run.1 == attempt)
        };
        assert_eq!(attempts(1).count(), attempts(2).count());
    }
    assert_eq!(shop.heard.count("strayed"), 0, "{:#?}", shop.heard.lines());
    assert_eq!(shop.heard.count("dead"), 0);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn schedules_and_redrives_follow() {
    let map = format!(
        "{MAP}
        [schedules.often]
        task = \"mail.send\"
        every = \"1s\"
        expires = \"1m\"
        payload = {{ number = 1 }}"
    );
    let shop = Shop::open_with(&map, || Outcome::dead("no")).await;
    let working = shop.work(&["urgent", "slow"]).await;
    shop.gate.add_permits(1);
    shop.app.publish(Send { number: 1 }).await.unwrap();
    shop.heard.until("dead report.send", 1).await;
    let overriding = shop.control.override_tasks(["report.send", "mail.send"]);
    overriding.tier("bulk").await.unwrap();
    working.end().await;

    let begun = shop.another().connect().await.unwrap();
    let letters = begun.dead_letters().unwrap();
    let listed = letters
        .list(&Filter::default(), Page::default())
        .await
        .unwrap();
    let redriven = letters.redrive(listed.letters[0].id).await.unwrap();
    assert_eq!(redriven.tier, "bulk");
    let rows = shop.rows("ready", "report.send").await;
    assert_eq!(rows, [("bulk".to_owned(), 1, 5)]);

    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let scheduler = begun.scheduler().unwrap();
    let running = tokio::spawn(scheduler.until(async {
        let _ = stopped.await;
    }));
    until(async || !shop.rows("ready", "mail.send").await.is_empty()).await;
    stop.send(()).unwrap();
    running.await.unwrap().unwrap();
    let rows = shop.rows("ready", "mail.send").await;
    assert!(rows.iter().all(|(tier, ..)| tier == "bulk"), "{rows:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_move_in_their_order_and_what_waits_in_a_queue_stays() {
    const COUNT: u32 = 1_300;
    let shop = Shop::open().await;
    let publish = async |task: &str, number: u32, delay: &str| {
        let published = shop
            .app
            .publish_named(task, &serde_json::json!({ "number": number }));
        let priority = u8::try_from(number % 3).unwrap();
        published.priority(priority).delay(delay).await.unwrap().id
    };
    let mut requests = Vec::new();
    for number in 0..COUNT {
        let mut request = PublishRequest::new(&Send { number }).unwrap();
        request.priority = u8::try_from(number % 3).ok();
        requests.push(request);
        if number % 10 == 0 {
            requests.push(PublishRequest::new(&Mail { number }).unwrap());
        }
    }
    let published: Vec<_> = shop
        .app
        .publish_many(stream::iter(requests))
        .collect()
        .await;
    assert!(published.iter().all(Result::is_ok));
    let escalated = publish("report.send", COUNT, "0s").await;
    for number in 0..4 {
        publish("report.send", number, "1h").await;
    }
    for number in 0..3 {
        shop.app.publish(Export { number }).await.unwrap();
    }
    // One that an operator has moved by itself stays where it is.
    let backlog = shop.app.backlog().unwrap();
    backlog.escalate(&escalated, "idle").await.unwrap();
    // Two are paused, one of which is the first of its lane.
    let park = "WITH lane AS (INSERT INTO tierline.lanes (backlog, task, key, counted, rank, turn) \
                    SELECT id, 'report.send', '', 0, -1, now() FROM tierline.backlogs WHERE tier = 'rows' RETURNING *) \
                INSERT INTO tierline.parked (id, lane, due_at, backlog, rank, task, payload) \
                SELECT gen_random_uuid(), id, now(), backlog, -1, task, '{\"number\": 2000}' FROM lane, generate_series(1, 2)";
    sqlx::query(park).execute(&shop.pool).await.unwrap();
    shop.add_idle_worker().await;
    let before = shop.rows("ready", "report.send").await;

    let overridden = shop
        .control
        .override_prefix("report.")
        .tier("bulk")
        .await
        .unwrap();
    assert_eq!(overridden.moved, u64::from(COUNT) + 4 + 2);
    let [waiting] = overridden.waiting.as_slice() else {
        panic!("{overridden:?}");
    };
    assert_eq!((waiting.tier.as_str(), waiting.messages), ("high", Some(3)));
    let after = shop.rows("ready", "report.send").await;
    let in_tier = |rows: &[(String, i64, i16)], tier: &str| {
        let rows = rows.iter().filter(|row| row.0 == tier);
        rows.map(|row| (row.1, row.2)).collect::<Vec<_>>()
    };
    let (mut was_parked, was_ready) = (Vec::new(), in_tier(&after, "bulk").into_iter());
    let was_ready: Vec<_> = was_ready
        .filter(|row| {
            row.0 < 2_000 || {
                was_parked.push(*row);
                false
            }
        })
        .collect();
    assert_eq!(was_ready, in_tier(&before, "rows"));
    // They are ready until workers of the tier park them again.
    assert_eq!(was_parked, [(2_000, 1), (2_000, 1)]);
    let lanes: Vec<(Option<i16>, bool)> =
        sqlx::query_as("SELECT rank, emptied_at IS NOT NULL FROM tierline.lanes")
            .fetch_all(&shop.pool)
            .await
            .unwrap();
    assert_eq!(lanes, [(None, true)]);
    assert_eq!(in_tier(&after, "idle").len(), 1);
    assert_eq!(in_tier(&after, "rows"), []);
    assert_eq!(shop.rows("ready", "mail.send").await.len(), 130);
    let scheduled = shop.rows("scheduled", "report.send").await;
    assert!(scheduled.len() == 4 && scheduled.iter().all(|row| row.0 == "bulk"));
    // Another override moves them again, to a tier with fewer priorities, and then they get one priority.
    let overridden = shop
        .control
        .override_prefix("report.")
        .tier("rows")
        .priority(5);
    assert_eq!(overridden.await.unwrap().moved, u64::from(COUNT) + 6);
    let rows = in_tier(&shop.rows("ready", "report.send").await, "rows");
    assert!(rows.len() == COUNT as usize + 2 && rows.iter().all(|row| row.1 == 5));
    // What is moved already is not moved again, and what would expire stays.
    let old = "UPDATE tierline.ready SET due_at = now() - interval '2h' WHERE task = 'report.send' \
               AND (convert_from(payload, 'UTF8')::jsonb ->> 'number')::integer < 10";
    sqlx::query(old).execute(&shop.pool).await.unwrap();
    let overridden = shop.control.override_task("report.send").tier("fresh");
    let overridden = overridden.await.unwrap();
    assert_eq!(overridden.moved, u64::from(COUNT) + 6 - 10);
    assert!(
        overridden
            .notes
            .iter()
            .any(|it| it.contains("10 rows stay in tier rows")),
        "{overridden:?}"
    );
    // The end moves nothing.
    let ended = shop.control.end_override_task("report.send").await.unwrap();
    assert!(ended.notes[0].contains("stay"), "{ended:?}");
    let rows = shop.rows("ready", "report.send").await;
    assert_eq!(in_tier(&rows, "fresh").len(), COUNT as usize + 2 - 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_moved_runs_where_it_is() {
    let shop = Shop::open().await;
    for number in 0..20 {
        shop.app.publish(Send { number }).await.unwrap();
    }
    let working = shop.work(&["slow"]).await;
    let overridden = shop.control.override_task("report.send").tier("bulk");
    assert_eq!(overridden.await.unwrap().moved, 20);
    shop.heard.until("done report.send", 20).await;
    let runs = shop.runs.lock().unwrap().clone();
    assert!(runs.iter().all(|run| run.2 == "bulk"), "{runs:?}");
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_override_that_cannot_work_is_refused_and_changes_nothing() {
    let shop = Shop::open().await;
    let working = shop.work(&["urgent", "slow"]).await;
    let control = &shop.control;
    let mail = || control.override_task("mail.send");
    for (overriding, expected) in [
        (mail().tier("buk"), "did you mean \"bulk\"?"),
        (
            control.override_task("mail.sent").tier("bulk"),
            "did you mean \"mail.send\"?",
        ),
        (mail(), "neither a tier nor a priority"),
        (mail().priority(6), "which takes 0 to 5"),
        (mail().tier("bulk").priority(11), "which takes 0 to 10"),
        (
            mail().tier("low").priority(1),
            "tier low of task \"mail.send\" has no priorities",
        ),
        (
            control.override_prefix("repotr.").tier("bulk"),
            "no task that begins with \"repotr.\"; did you mean \"report.\"?",
        ),
        (
            control.override_tasks(Vec::<String>::new()).tier("bulk"),
            "1 to 500 names",
        ),
        (mail().tier("idle"), "no live process serves tier idle"),
        (mail().tier("plain"), "no delay queues"),
        (mail().tier("bulk").lasting("0s"), "longer than zero"),
        (
            control.override_prefix("sms.").tier("bulk"),
            "no live process that serves tier bulk has a handler for sms.send",
        ),
    ] {
        let refused = refusal(overriding).await;
        assert!(refused.contains(expected), "{refused}");
        assert!(refused.starts_with("cannot override "), "{refused}");
    }
    assert_eq!(control.list().await.unwrap(), []);
    // A priority alone asks nobody for the handler.
    let overridden = control.override_task("sms.send").priority(1).await.unwrap();
    let setting = Setting::Override {
        tier: None,
        priority: Some(1),
    };
    assert_eq!(overridden.after[0].setting, setting);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_names_overrides_and_those_that_cannot_work() {
    let shop = Shop::open().await;
    let working = shop.work(&["slow"]).await;
    let control = &shop.control;
    let overriding = control.override_task("mail.send").tier("bulk").priority(3);
    overriding.because("too slow").lasting("1h").await.unwrap();
    let report = control.doctor().await.unwrap();
    assert!(report.is_well(), "{report}");
    assert_eq!(report.findings.len(), 1);
    let note = &report.findings[0];
    assert_eq!(note.object, "override of task mail.send");
    assert!(
        note.what
            .starts_with("goes to tier bulk with priority 3 until 2"),
        "{}",
        note.what
    );
    assert!(
        note.what.contains("; ada made it at ") && note.what.ends_with(": too slow"),
        "{}",
        note.what
    );
    working.end().await;
    let report = control.doctor().await.unwrap();
    assert!(!report.is_well(), "{report}");
    assert!(
        report.findings[0]
            .what
            .contains("no live process serves tier bulk"),
        "{report}"
    );
    // A later map has neither the tier nor the task.
    let map = MAP
        .replace("\"mail.send\"", "\"mail.post\"")
        .replace("bulk", "batch");
    let database = shop.app.database().unwrap().clone();
    let control = Control::new(Topology::parse(map).unwrap(), database);
    let report = control.doctor().await.unwrap();
    let found: Vec<_> = report.findings.iter().map(|it| it.what.as_str()).collect();
    assert!(
        found.contains(&"the map has no such task any more"),
        "{report}"
    );
    assert!(
        found.contains(&"the map has no tier bulk, so its tasks go by the map"),
        "{report}"
    );
}
