//! How attempts end that have committed, and those that have not.

use std::time::Duration;

use tierline::Error;
use tierline::error::TransactionError;

use super::{Act, AddBriefly, Bank, HOMES, Home, add};

#[tokio::test(flavor = "multi_thread")]
async fn a_handlers_writes_and_its_completion_are_one_commit() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let working = bank.work();
        bank.app.publish(add(1, &[Act::Commit])).await.unwrap();
        bank.heard.until("done account.add 1", 1).await;
        working.end().await;
        assert_eq!((bank.value(1).await, bank.count("completed").await), (1, 1));
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_done_after_its_commit_whatever_its_handler_does_then() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let working = bank.work();
        let acts = [
            Act::CommitAndFail,
            Act::CommitAndPanic,
            Act::CommitAndSnooze,
            Act::CommitAndDiscard,
            Act::CommitAndGiveUp,
        ];
        for (account, act) in (0..).zip(acts) {
            bank.app.publish(add(account, &[act])).await.unwrap();
        }
        bank.heard.until("done account.add 1", acts.len()).await;
        working.end().await;
        for (account, act) in (0..).zip(acts) {
            assert_eq!(bank.value(account).await, 1, "{act:?}");
        }
        assert_eq!(bank.heard.count("started"), acts.len());
        for event in ["retried", "snoozed", "discarded", "dead"] {
            assert_eq!(bank.heard.count(event), 0, "{:#?}", bank.heard.lines());
        }
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_done_after_its_commit_also_if_its_handler_is_stopped_or_cannot_be() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let working = bank.work();
        let acts = [Act::CommitAndStay, Act::CommitAndBlock];
        for (account, act) in (0..).zip(acts) {
            let briefly = AddBriefly(add(account, &[act]));
            bank.app.publish(briefly).await.unwrap();
        }
        bank.heard.until("done account.add_briefly", 2).await;
        working.end().await;
        // A handler that did not even come to its commit within the timeout, on a slow machine, is retried.
        assert_eq!((bank.value(0).await, bank.value(1).await), (1, 1));
        assert_eq!(bank.heard.count("dead"), 0, "{:#?}", bank.heard.lines());
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_a_shutdown_drops_after_its_commit_is_not_given_back() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let worker = bank.app.work(["all"]).grace(Duration::from_millis(10));
        let working = tokio::spawn(worker.until(async { drop(stopped.await) }));
        bank.app
            .publish(add(1, &[Act::CommitAndWait]))
            .await
            .unwrap();
        bank.teller.until_committed().await;
        stop.send(()).unwrap();
        working.await.unwrap().unwrap();
        assert_eq!(
            (bank.heard.count("given back"), bank.heard.count("done")),
            (0, 1)
        );
        // Nothing is left for the next one.
        let next = Bank::open_beside(&bank, &home.map()).await;
        let working = next.work();
        next.app.publish(add(2, &[Act::Commit])).await.unwrap();
        next.heard.until("done", 1).await;
        working.end().await;
        assert_eq!(next.heard.count("started"), 1);
        assert_eq!((bank.value(1).await, bank.value(2).await), (1, 1));
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_committed_is_not_written_and_the_handlers_result_counts() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let working = bank.work();
        bank.app
            .publish(add(1, &[Act::Fail, Act::Fail, Act::Commit]))
            .await
            .unwrap();
        bank.app.publish(add(2, &[Act::Forget])).await.unwrap();
        bank.app
            .publish(add(3, &[Act::RollBackAndCommit]))
            .await
            .unwrap();
        bank.heard.until("done account.add", 3).await;
        working.end().await;
        let values = [
            bank.value(1).await,
            bank.value(2).await,
            bank.value(3).await,
        ];
        assert_eq!(values, [1, 0, 1]);
        assert_eq!(bank.heard.count("retried"), 2);
        assert_eq!(bank.count("completed").await, 2);
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_handler_publishes_within_its_transaction_runs_if_it_commits() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let working = bank.work();
        let acts = [Act::PublishAndFail, Act::PublishAndCommit];
        bank.app.publish(add(1, &acts)).await.unwrap();
        bank.heard.until("done account.add", 2).await;
        working.end().await;
        assert_eq!((bank.value(1).await, bank.value(101).await), (1, 1));
        assert_eq!(bank.heard.count("started"), 3, "{:#?}", bank.heard.lines());
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_has_one_transaction_at_a_time_and_none_after_its_commit() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let working = bank.work();
        bank.app.publish(add(1, &[Act::OpenTwice])).await.unwrap();
        bank.heard.until("done", 1).await;
        bank.app.publish(add(2, &[Act::CommitTwice])).await.unwrap();
        bank.heard.until("done", 2).await;
        working.end().await;
        let errors = bank.teller.errors.lock().unwrap();
        assert!(
            matches!(
                errors.as_slice(),
                [
                    Error::Transaction(TransactionError::StillOpen { .. }),
                    Error::Transaction(TransactionError::AlreadyCommitted { .. }),
                ]
            ),
            "{errors:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_within_that_did_not_end_lets_nothing_be_committed() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let working = bank.work();
        for (account, act) in (1..).zip([Act::LeaveOpen, Act::DropBegin]) {
            let adding = add(account, &[act, Act::Commit]);
            bank.app.publish(adding).await.unwrap();
            bank.heard
                .until("done account.add 2", account as usize)
                .await;
        }
        working.end().await;
        assert_eq!((bank.value(1).await, bank.value(2).await), (1, 1));
        {
            let errors = bank.teller.errors.lock().unwrap();
            let are_told = errors.iter().all(|error| {
                matches!(
                    error,
                    Error::Transaction(TransactionError::Unbalanced { .. })
                )
            });
            assert!(are_told && errors.len() == 2, "{errors:?}");
        }
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_with_one_snapshot_completes_its_task_too() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        let working = bank.work();
        for account in 0..5 {
            let adding = add(account, &[Act::RepeatableRead]);
            bank.app.publish(adding).await.unwrap();
        }
        bank.heard.until("done account.add 1", 5).await;
        working.end().await;
        assert!(
            bank.teller.errors().is_empty(),
            "{:?}",
            bank.teller.errors()
        );
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_the_database_refuses_leaves_nothing_and_is_retried() {
    for home in HOMES {
        let bank = Bank::open(home).await;
        // Checked at the commit. The first one fails.
        sqlx::raw_sql(
            "CREATE SEQUENCE commits; \
             CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 IF nextval('commits') = 1 THEN RAISE EXCEPTION 'not today'; END IF; RETURN NULL; END $$; \
             CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON accounts \
                 DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .execute(&bank.pool)
        .await
        .unwrap();
        let working = bank.work();
        bank.app.publish(add(1, &[Act::Commit])).await.unwrap();
        bank.heard.until("done account.add 2", 1).await;
        working.end().await;
        assert_eq!(bank.value(1).await, 1);
        let errors = bank.teller.errors();
        assert!(
            errors.len() == 1 && errors[0].contains("not today"),
            "{errors:?}"
        );
        bank.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_that_keeps_its_tasks_keeps_those_that_committed() {
    let map = Home::Rows
        .map()
        .replace("\"postgres\"", "\"postgres\"\nkeep = \"1h\"");
    let bank = Bank::open_with(&map, Home::Rows).await;
    let working = bank.work();
    let receipt = bank
        .app
        .publish(add(1, &[Act::CommitAndFail]))
        .await
        .unwrap();
    bank.heard.until("done", 1).await;
    working.end().await;
    let details = bank.app.backlog().unwrap().get(&receipt.id).await.unwrap();
    assert!(format!("{details:?}").contains("Done"), "{details:?}");
    assert_eq!(
        (bank.count("finished").await, bank.count("running").await),
        (1, 0)
    );
}
