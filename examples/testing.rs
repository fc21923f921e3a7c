//! `cargo test --example testing`: your tasks, tested without a broker.
//!
//! Needs the feature `testing`, for tests alone:
//!
//! ```toml
//! [dev-dependencies]
//! tierline = { version = "0.1", features = ["testing"] }
//! ```

use serde::{Deserialize, Serialize};
use tierline::{Context, TaskError, task};

#[derive(Serialize, Deserialize)]
struct Charge {
    order: u64,
    cents: u64,
}

#[derive(Serialize, Deserialize)]
struct SendReceipt {
    order: u64,
}

#[task(name = "card.charge", retries = 3)]
async fn charge(charge: Charge, cx: Context) -> Result<(), TaskError> {
    if charge.cents == 0 {
        return Err(TaskError::permanent("nothing to charge"));
    }
    cx.data::<Bank>().take(charge.cents, cx.attempt())?;
    let order = charge.order;
    cx.publish(SendReceipt { order }).delay("5m").await?;
    Ok(())
}

#[task(name = "email.send_receipt")]
async fn send_receipt(receipt: SendReceipt) -> Result<(), TaskError> {
    println!("receipt of order {}", receipt.order);
    Ok(())
}

/// A bank that answers from a certain attempt on.
struct Bank {
    answers_from: u32,
}

impl Bank {
    fn take(&self, _cents: u64, attempt: u32) -> Result<(), &'static str> {
        match attempt >= self.answers_from {
            true => Ok(()),
            false => Err("the bank does not answer"),
        }
    }
}

fn main() {
    println!("these tasks are for testing: cargo test --example testing");
}

#[cfg(test)]
mod tests {
    use tierline::Topology;
    use tierline::execute::Verdict;
    use tierline::testing::Tester;

    use super::*;

    const MAP: &str = r#"
        app = "testing"
        [tiers.high]
        queue = "classic"
        [tiers.normal]
        queue = "quorum"
        [groups.all]
        tiers = ["high", "normal"]
        concurrency = 4
        [tasks]
        "card.charge" = "high"
        "email.send_receipt" = "normal"
    "#;

    fn tester(bank: Bank) -> Tester {
        Tester::builder()
            .topology(Topology::parse(MAP).expect("a map without mistakes"))
            .data(bank)
            .build()
    }

    #[tokio::test]
    async fn a_charge_is_followed_by_a_receipt() {
        let tester = tester(Bank { answers_from: 1 });
        let (order, cents) = (7, 9_900);
        let run = tester.run(Charge { order, cents }).await;
        assert_eq!(run.verdict, Verdict::Done);
        tester.assert_published(&SendReceipt { order });

        // Runs what was published, in the order in which it falls due, without waiting.
        let runs = tester.drain().await.expect("an end");
        assert_eq!(runs[0].message.tier, "normal");
        assert_eq!(runs[0].verdict, Verdict::Done);
    }

    #[tokio::test]
    async fn a_bank_that_does_not_answer_is_asked_again() {
        let tester = tester(Bank { answers_from: 3 });
        let (order, cents) = (7, 9_900);
        let runs = tester.run_to_end(Charge { order, cents }).await;
        assert_eq!(runs.expect("an end").len(), 3);
    }

    #[tokio::test]
    async fn nothing_is_never_charged() {
        let tester = tester(Bank { answers_from: 1 });
        let run = tester.run(Charge { order: 7, cents: 0 }).await;
        assert!(matches!(run.verdict, Verdict::Dead { .. }), "{run:?}");
        tester.assert_nothing_published();
    }
}
