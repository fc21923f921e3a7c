//! One back.

use futures_util::future::join_all;
use lapin::BasicProperties;
use tierline::Error;
use tierline::dead::{Filter, Outcomes, RedriveOutcome, State};
use tierline::error::{DeadLetterError, PublishError};
use tierline_testbed::{Broker, Vhost};

use super::support::{Letter, MAP, Shop, connect, execute, until};

/// A shop with one dead letter in its log.
async fn with_one(letter: &Letter<'_>) -> (Shop, i64) {
    let shop = Shop::open().await;
    shop.dies("normal", letter).await;
    let collecting = shop.collect();
    let id = shop.logged(1).await[0].id;
    collecting.stop().await;
    (shop, id)
}

#[tokio::test]
async fn a_redriven_message_begins_anew_and_keeps_what_is_its_own() {
    let (shop, id) = with_one(&Letter::default()).await;
    let letters = shop.letters.clone().by("ada").because("it is back");
    let receipt = letters.redrive(id).await.unwrap();
    assert_eq!(
        (receipt.id.as_str(), receipt.tier.as_str()),
        ("ship-1", "normal")
    );
    let message = shop.take("shop.normal", 1).await.remove(0);
    assert_eq!(
        (message.id.as_str(), message.task.as_str()),
        ("ship-1", "order.ship")
    );
    assert_eq!(message.payload, br#"{"order":1}"#);
    assert_eq!((message.attempt, message.crashes, message.life), (1, 0, 1));
    assert_eq!((message.expires_at, message.history.len()), (None, 0));
    assert_eq!(message.headers["tenant"], "ada");
    assert_eq!(message.priority, 1);
    let redriven = message.redriven.unwrap();
    assert_eq!(
        (redriven.from, redriven.by.as_str()),
        (id.to_string(), "ada")
    );
    let row = letters.get(id).await.unwrap();
    assert_eq!(row.summary.state, State::Redriven);
    let action = &row.actions[0];
    assert_eq!(
        (action.who.as_str(), action.what.as_str()),
        ("ada", "redriven")
    );
    assert_eq!(action.why, "it is back");
}

#[tokio::test]
async fn a_redriven_task_that_fails_again_is_a_new_death_linked_to_the_first() {
    let (shop, first) = with_one(&Letter::default()).await;
    shop.letters.redrive(first).await.unwrap();
    let message = shop.take("shop.normal", 1).await.remove(0);
    let again = Letter {
        life: message.life.into(),
        redriven_from: message.redriven.unwrap().from.parse().ok(),
        ..Letter::default()
    };
    let collecting = shop.collect();
    shop.dies("normal", &again).await;
    let rows = shop.logged(2).await;
    let second = rows.iter().find(|row| row.id != first).unwrap();
    assert_eq!((second.life, second.redriven_from), (1, Some(first)));
    assert_eq!(second.state, State::Dead);
    let row = shop.letters.get(first).await.unwrap();
    assert_eq!(row.summary.outcome, Some(RedriveOutcome::Dead));
    assert_eq!(row.died_again_as, [second.id]);
    let error = shop.letters.redrive(first).await.unwrap_err();
    assert!(error.to_string().contains("already redriven"), "{error}");
    shop.letters.redrive(second.id).await.unwrap();
    assert_eq!(shop.take("shop.normal", 1).await[0].life, 2);
    collecting.stop().await;
}

#[tokio::test]
async fn two_operators_redrive_one_row_once() {
    let (shop, id) = with_one(&Letter::default()).await;
    let redriven = join_all((0..8).map(|_| shop.letters.redrive(id))).await;
    assert_eq!(redriven.iter().filter(|result| result.is_ok()).count(), 1);
    for error in redriven.into_iter().filter_map(Result::err) {
        assert!(
            matches!(error, Error::DeadLetter(DeadLetterError::Refused { .. })),
            "{error}"
        );
    }
    assert_eq!(shop.depth("shop.normal").await, 1);
}

#[tokio::test]
async fn what_cannot_be_published_is_refused_with_the_reason_and_stays_dead() {
    let shop = Shop::open().await;
    let unmapped = Letter {
        task: "order.forget",
        id: "unmapped",
        ..Letter::default()
    };
    shop.dies("normal", &unmapped).await;
    let nameless = BasicProperties::default().with_delivery_mode(2);
    shop.send("shop.normal.dlx", "", b"1", nameless).await;
    let collecting = shop.collect();
    for row in shop.logged(2).await {
        let error = shop.letters.redrive(row.id).await.unwrap_err();
        let expected = match row.task {
            Some(_) => "`order.forget` is not mapped",
            None => "\"type\" is missing",
        };
        assert!(error.to_string().contains(expected), "{error}");
        let row = shop.letters.get(row.id).await.unwrap();
        assert_eq!(row.summary.state, State::Dead);
    }
    collecting.stop().await;
}

#[tokio::test]
async fn a_message_without_an_id_has_the_same_one_whenever_it_is_redriven() {
    let shop = Shop::open().await;
    let plain = BasicProperties::default().with_type("order.ship".into());
    let plain = plain.with_delivery_mode(2);
    shop.send("shop.normal.dlx", "", b"7", plain).await;
    let collecting = shop.collect();
    let first = shop.logged(1).await[0].id;
    let receipt = shop.letters.redrive(first).await.unwrap();
    let message = shop.take("shop.normal", 1).await.remove(0);
    assert_eq!(message.id, receipt.id);
    // As after a crash between the confirm and the mark.
    execute(&shop, "UPDATE tierline.dead_letters SET state = 'dead'").await;
    let again = shop.letters.redrive(first).await.unwrap();
    assert_eq!(again.id, receipt.id);
    let copy = shop.take("shop.normal", 1).await.remove(0);
    assert_eq!(copy.id, receipt.id);

    // Both copies die again, as one message.
    for copy in [message, copy] {
        let letter = Letter {
            id: copy.id.as_str(),
            payload: "7",
            life: copy.life.into(),
            redriven_from: copy.redriven.unwrap().from.parse().ok(),
            ..Letter::default()
        };
        shop.dies("normal", &letter).await;
    }
    let rows = shop.logged(2).await;
    until("the queue to be empty", async || {
        shop.depth("shop.normal.dlq").await == 0
    })
    .await;
    collecting.stop().await;
    assert_eq!(shop.logged(2).await, rows);
    let second = rows.iter().find(|row| row.id != first).unwrap();
    let row = shop.letters.get(first).await.unwrap();
    assert_eq!(row.died_again_as, [second.id]);
}

#[tokio::test]
async fn a_task_goes_to_the_tier_that_the_map_gives_it_today() {
    let (shop, id) = with_one(&Letter::default()).await;
    let moved =
        super::support::MAP.replace(r#""order.ship" = "normal""#, r#""order.ship" = "critical""#);
    let (app, _) = connect(&shop.vhost, shop.database.url(), &moved).await;
    let receipt = app.dead_letters().unwrap().redrive(id).await.unwrap();
    assert_eq!(receipt.tier, "critical");
    assert_eq!(shop.take("shop.critical", 1).await[0].priority, 5);
}

#[tokio::test]
async fn how_a_redrive_ended_is_in_its_row() {
    let (shop, id) = with_one(&Letter::default()).await;
    shop.letters.redrive(id).await.unwrap();
    let message = shop.take("shop.normal", 1).await.remove(0);
    let outcomes = Outcomes::start(shop.app.database().unwrap().clone(), "shop");
    let mut stale = message.clone();
    stale.life = 7;
    outcomes.record(&stale, RedriveOutcome::Expired);
    outcomes.record(&message, RedriveOutcome::Done);
    until("the outcome to be written", async || {
        let row = shop.letters.get(id).await.unwrap();
        row.summary.outcome == Some(RedriveOutcome::Done)
    })
    .await;
}

#[tokio::test]
async fn what_is_discarded_stays_to_be_seen_and_can_be_brought_back() {
    let (shop, id) = with_one(&Letter::default()).await;
    let letters = shop.letters.clone().by("ada").because("a test");
    letters.discard(id).await.unwrap();
    let error = letters.discard(id).await.unwrap_err();
    assert!(error.to_string().contains("discarded"), "{error}");
    let row = letters.get(id).await.unwrap();
    assert_eq!(row.summary.state, State::Discarded);
    assert_eq!(row.actions[0].who, "ada");
    letters.redrive(id).await.unwrap();
    assert_eq!(shop.depth("shop.normal").await, 1);
    let purged = letters.purge(&Filter::default()).await.unwrap();
    assert_eq!(purged.done, 1);
}

#[tokio::test]
async fn a_row_stays_dead_when_the_broker_takes_nothing() {
    let (shop, id) = with_one(&Letter::default()).await;
    let vhost: &Vhost = &shop.vhost;
    vhost.delete_queue("shop.normal").await.unwrap();
    let error = shop.letters.redrive(id).await.unwrap_err();
    assert!(
        matches!(error, Error::Publish(PublishError::Unroutable { .. })),
        "{error}"
    );
    let row = shop.letters.get(id).await.unwrap();
    assert_eq!((row.summary.state, row.actions.len()), (State::Dead, 0));
}

#[tokio::test]
async fn a_discarded_row_whose_redrive_fails_stays_discarded() {
    let (shop, id) = with_one(&Letter::default()).await;
    shop.letters.discard(id).await.unwrap();
    let state = async || shop.letters.get(id).await.unwrap().summary.state;
    // Refused before it is published; and by the broker.
    let elsewhere = super::support::MAP.replace("order.ship", "order.sail");
    let (app, _) = connect(&shop.vhost, shop.database.url(), &elsewhere).await;
    let error = app.dead_letters().unwrap().redrive(id).await.unwrap_err();
    assert!(error.to_string().contains("not mapped"), "{error}");
    assert_eq!(state().await, State::Discarded);
    shop.vhost.delete_queue("shop.normal").await.unwrap();
    let error = shop.letters.redrive(id).await.unwrap_err();
    assert!(
        matches!(error, Error::Publish(PublishError::Unroutable { .. })),
        "{error}"
    );
    assert_eq!(state().await, State::Discarded);
    let counts = shop.letters.by_tier().await.unwrap();
    assert_eq!((counts[1].dead, counts[1].discarded), (0, 1), "{counts:?}");
}

#[tokio::test]
async fn an_abandoned_claim_leaves_a_discarded_row_discarded() {
    let (shop, id) = with_one(&Letter::default()).await;
    shop.letters.discard(id).await.unwrap();
    // A process that was killed while it redrove the row, an hour ago.
    let abandon = "UPDATE tierline.dead_letters SET state = 'redriving', claimed_from = state, \
                   claim = 'a dead process', claimed_at = now() - interval '1 hour'";
    execute(&shop, abandon).await;
    let operation = shop.letters.redrive_all(Filter::default()).run().await;
    assert_eq!(operation.unwrap().done, 0);
    let row = shop.letters.get(id).await.unwrap();
    assert_eq!(row.summary.state, State::Discarded);
    // Taken up by somebody whose redrive fails.
    execute(&shop, abandon).await;
    shop.vhost.delete_queue("shop.normal").await.unwrap();
    shop.letters.redrive(id).await.unwrap_err();
    let row = shop.letters.get(id).await.unwrap();
    assert_eq!(row.summary.state, State::Discarded);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_goes_away_leaves_nothing_claimed() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let shop = Shop::on(vhost, tierline_testbed::database().await, MAP).await;
    shop.dies("normal", &Letter::default()).await;
    let collecting = shop.collect();
    let id = shop.logged(1).await[0].id;
    collecting.stop().await;
    let state = async || shop.letters.get(id).await.unwrap().summary.state;
    broker.pause().await.unwrap();
    tokio::select! {
        redriven = shop.letters.redrive(id) => panic!("the broker is frozen: {redriven:?}"),
        () = until("the claim", async || state().await == State::Redriving) => {}
    }
    broker.resume().await.unwrap();
    until("the row to be free", async || {
        state().await != State::Redriving
    })
    .await;
    assert_eq!(state().await, State::Redriven);
    assert_eq!(shop.depth("shop.normal").await, 1);
}
