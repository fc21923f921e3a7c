//! What the handlers do, without a broker.

#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

use first_app::{Book, Confirm, Mailer, NIGHT};
use first_app_billing::Charge;
use tierline::Topology;
use tierline::execute::Verdict;
use tierline::testing::Tester;

fn tester() -> Tester {
    Tester::builder()
        .topology(Topology::load("topology.toml").unwrap())
        .data(Mailer::default())
        .build()
}

#[tokio::test]
async fn a_booking_is_charged_and_confirmed() {
    let tester = tester();
    let run = tester
        .run(Book {
            guest: "Ada".into(),
            nights: 2,
        })
        .await;
    assert_eq!(run.verdict, Verdict::Done);
    tester.assert_published(&Charge {
        guest: "Ada".into(),
        cents: 2 * NIGHT,
    });
    tester.assert_published(&Confirm {
        guest: "Ada".into(),
    });

    let runs = tester.drain().await.unwrap();
    assert!(
        runs.iter().all(|run| run.verdict == Verdict::Done),
        "{runs:?}"
    );
    assert_eq!(
        runs.iter()
            .map(|run| run.message.tier.as_str())
            .collect::<Vec<_>>(),
        ["high", "normal"]
    );
}

#[tokio::test]
async fn a_stay_of_no_nights_is_discarded() {
    let tester = tester();
    let run = tester
        .run(Book {
            guest: "Ada".into(),
            nights: 0,
        })
        .await;
    assert!(matches!(run.verdict, Verdict::Discarded { .. }), "{run:?}");
    tester.assert_nothing_published();
}

#[tokio::test]
async fn a_charge_of_nothing_is_dead_at_once() {
    let run = tester()
        .run(Charge {
            guest: "Ada".into(),
            cents: 0,
        })
        .await;
    assert!(matches!(run.verdict, Verdict::Dead { .. }), "{run:?}");
}
