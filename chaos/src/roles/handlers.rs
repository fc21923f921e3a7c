//! The handlers. Each records its work in the ledger before it returns.

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tierline::{Context, Registry, Task, TaskError, TaskOptions};

use crate::ledger::{Fact, Ledger, now};

macro_rules! tasks {
    ($($task:ident is $name:literal,)*) => {$(
        #[derive(Serialize, Deserialize)]
        struct $task {}

        impl Task for $task {
            const NAME: &'static str = $name;
        }
    )*};
}

tasks! {
    Urgent is "urgent",
    Flaky is "flaky",
    Usual is "usual",
    Doomed is "doomed",
    Tick is "tick",
    Slow is "slow",
    Parent is "parent",
    Child is "child",
}

pub(super) fn registry() -> Result<Registry> {
    let quick = TaskOptions::new()
        .retries(1)
        .backoff(Duration::from_millis(200));
    let mut registry = Registry::new();
    registry.register::<Urgent, _>(|_: Urgent, cx: Context| work(cx, 2))?;
    registry.register::<Usual, _>(|_: Usual, cx: Context| work(cx, 5))?;
    registry.register::<Child, _>(|_: Child, cx: Context| work(cx, 0))?;
    registry.register::<Tick, _>(|_: Tick, cx: Context| work(cx, 0))?;
    registry.register::<Slow, _>(|_: Slow, cx: Context| work(cx, 100))?;
    registry.register::<Parent, _>(|_: Parent, cx: Context| bear(cx))?;
    registry.register_with::<Flaky, _>(|_: Flaky, cx: Context| fail_first(cx), quick.clone())?;
    registry.register_with::<Doomed, _>(|_: Doomed, cx: Context| fail(cx), quick)?;
    Ok(registry)
}

async fn work(cx: Context, milliseconds: u64) -> Result<(), TaskError> {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
    let tier = cx.tier().to_owned();
    cx.data::<Ledger>().note(cx.id(), Fact::Ran { tier })?;
    Ok(())
}

/// Publishes a child task, with the same id in every run.
async fn bear(cx: Context) -> Result<(), TaskError> {
    let (sent, id) = (now(), format!("{}.child", cx.id()));
    let receipt = cx.publish(Child {}).id(id.as_str()).await?;
    let tier = receipt.tier;
    let ledger = cx.data::<Ledger>();
    ledger.note(id, Fact::Confirmed { tier, sent })?;
    work(cx, 0).await
}

async fn fail_first(cx: Context) -> Result<(), TaskError> {
    match cx.attempt() {
        1 => fail(cx).await,
        _ => work(cx, 0).await,
    }
}

async fn fail(cx: Context) -> Result<(), TaskError> {
    cx.data::<Ledger>().note(cx.id(), Fact::Failed)?;
    Err("it fails on purpose".into())
}
