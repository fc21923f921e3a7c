//! What `#[task]` and `#[derive(Task)]` accept, and what they leave alone.

#![allow(clippy::unwrap_used)] // a test that cannot go on should stop
#![cfg(feature = "macros")]
#![forbid(unsafe_code)]
#![deny(warnings)]

use serde::{Deserialize, Serialize};
use tierline::execute::Verdict;
use tierline::testing::Tester;
use tierline::{Context, Outcome, Registry, Task, TaskError, task};

#[derive(Serialize, Deserialize)]
struct Plain;

#[task(name = "macros.plain")]
async fn plain(_: Plain) -> Result<(), TaskError> {
    Ok(())
}

#[derive(Serialize, Deserialize)]
struct Full {
    number: u32,
}

/// Documentation stays on the function.
#[task(
    name = "macros.full",
    retries = 5,
    backoff = "2s",
    backoff_max = "1h 30m",
    jitter = false,
    timeout = "20s",
    soft_timeout = "1500ms"
)]
async fn full(Full { number }: Full, cx: Context) -> Result<Outcome, TaskError> {
    assert_eq!(cx.task(), Full::NAME);
    Ok(if number == 0 {
        Outcome::discard("nothing to do")
    } else {
        Outcome::Done
    })
}

#[derive(Serialize, Deserialize, Task)]
#[task(name = "macros.derived")]
struct Derived {
    text: String,
}

#[task]
async fn derived(mut derived: Derived) -> anyhow::Result<()> {
    derived.text.push('!');
    Ok(())
}

#[derive(Serialize, Deserialize)]
struct OnAThread;

#[task(name = "macros.blocking", blocking)]
fn on_a_thread(_: OnAThread, _cx: Context) -> Result<(), TaskError> {
    Ok(())
}

mod elsewhere {
    use serde::{Deserialize, Serialize};
    use tierline::Context as Surroundings;

    type Returned = std::result::Result<(), std::num::ParseIntError>;

    #[derive(Serialize, Deserialize)]
    pub(super) struct Hidden(pub(super) String);

    #[tierline::task(name = "macros.hidden")]
    pub(super) async fn hidden(hidden: Hidden, _: Surroundings) -> Returned {
        hidden.0.parse::<u32>().map(drop)
    }
}

mod renamed {
    pub(super) use ::tierline as background;

    #[derive(serde::Serialize, serde::Deserialize, background::Task)]
    #[task(name = "macros.renamed", crate = "crate::renamed::background")]
    pub(super) struct Renamed;

    #[background::task(crate = "crate::renamed::background")]
    pub(super) async fn renamed(_: Renamed) {}
}

/// The names that the expansion uses mean something else here.
mod shadowing {
    #![allow(dead_code)]

    #[derive(serde::Serialize, serde::Deserialize)]
    pub(super) struct Shadowed;

    struct Task;
    struct TaskOptions;
    enum Option {}
    enum Result {}
    fn drop() {}
    mod tierline {}
    mod core {}
    mod std {}

    #[::tierline::task(name = "macros.shadowed", retries = 1, timeout = "1s")]
    async fn shadowed(_: Shadowed) {}
}

#[derive(Serialize, Deserialize)]
struct LeftOut;

#[task(name = "macros.left_out")]
#[cfg(any())]
async fn left_out(_: LeftOut) {
    this_function_does_not_exist()
}

#[cfg(any())]
#[task(name = "macros.left_out")]
async fn left_out_too(_: LeftOut) {}

#[task(name = "macros.left_out")]
#[cfg(feature = "macros")]
async fn kept(_: LeftOut) {}

#[derive(Serialize, Deserialize)]
struct Unusual(Vec<Option<Box<str>>>, #[serde(default)] Option<u8>);

#[task(name = "Ünüsual name: with/everything-in it")]
#[allow(clippy::unused_async)]
#[must_use]
pub(crate) async fn r#async(r#type: Unusual) -> Outcome
where
    Unusual: Sized,
{
    drop(r#type);
    Outcome::Done
}

macro_rules! handlers {
    ($($payload:ident $handler:ident $name:literal $timeout:literal),*) => { $(
        #[derive(Serialize, Deserialize)]
        struct $payload;

        #[task(name = $name, timeout = $timeout)]
        async fn $handler(_: $payload) {}
    )* };
}

handlers!(Generated generated "macros.generated" "20s");

fn registered(name: &str) -> (Registry, Option<u32>) {
    let registry = Registry::collected().unwrap();
    let line = registry
        .get(name)
        .map(|registration| registration.place().line());
    (registry, line)
}

#[test]
fn every_handler_of_the_program_is_collected_once() {
    let registry = Registry::collected().unwrap();
    let mut names: Vec<_> = registry
        .iter()
        .map(|registration| registration.name())
        .collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "macros.blocking",
            "macros.derived",
            "macros.full",
            "macros.generated",
            "macros.hidden",
            "macros.in_a_function",
            "macros.left_out",
            "macros.plain",
            "macros.renamed",
            "macros.shadowed",
            "Ünüsual name: with/everything-in it",
        ]
    );
}

#[test]
fn a_handler_inside_a_function_is_collected_too() {
    #[derive(Serialize, Deserialize)]
    struct Inner;

    #[task(name = "macros.in_a_function")]
    async fn inner(_: Inner) {}

    assert!(Registry::collected().unwrap().get(Inner::NAME).is_some());
}

#[test]
fn the_options_reach_the_registry() {
    let registry = Registry::collected().unwrap();
    let options = registry.get("macros.full").unwrap().options();
    assert_eq!(options.retry.retries, 5);
    assert_eq!(options.retry.backoff.as_secs(), 2);
    assert_eq!(options.retry.backoff_max.as_secs(), 5_400);
    assert!(!options.retry.jitter);
    assert_eq!(options.timeout.as_secs(), 20);
    assert_eq!(options.effective_soft_timeout().as_millis(), 1_500);
}

#[test]
fn the_place_of_a_handler_is_the_line_of_its_function() {
    let (registry, line) = registered("macros.full");
    assert!(
        registry
            .get("macros.full")
            .unwrap()
            .place()
            .file()
            .ends_with("tests/macros.rs")
    );
    let source: Vec<&str> = include_str!("macros.rs").lines().collect();
    let line = source[line.unwrap() as usize - 1];
    assert!(line.starts_with("async fn full("), "{line}");
}

#[tokio::test]
async fn every_shape_of_handler_runs() {
    let tester = Tester::new();
    for run in [
        tester.run(Plain).await,
        tester.run(Full { number: 1 }).await,
        tester
            .run(Derived {
                text: "text".into(),
            })
            .await,
        tester.run(OnAThread).await,
        tester.run(elsewhere::Hidden("12".into())).await,
        tester.run(renamed::Renamed).await,
        tester.run(shadowing::Shadowed).await,
        tester.run(LeftOut).await,
        tester.run(Generated).await,
        tester.run(Unusual(vec![None], Some(1))).await,
    ] {
        assert_eq!(run.verdict, Verdict::Done, "{run:?}");
    }
}

#[tokio::test]
async fn the_function_stays_callable() {
    plain(Plain).await.unwrap();
    derived(Derived {
        text: String::new(),
    })
    .await
    .unwrap();
    assert!(
        elsewhere::hidden(elsewhere::Hidden("x".into()), context())
            .await
            .is_err()
    );
    on_a_thread(OnAThread, context()).unwrap();
    renamed::renamed(renamed::Renamed).await;
    kept(LeftOut).await;
}

fn context() -> Context {
    let tester = Tester::new();
    tester.context(&tester.message(&Plain))
}
