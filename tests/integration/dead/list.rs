//! Reading the log.

use std::time::{Duration, SystemTime};

use tierline::Error;
use tierline::dead::{Advice, Filter, Page, Reason, RootCause, State};
use tierline::error::DeadLetterError;

use super::support::{Letter, Shop};

/// A log with twelve rows, a second apart: ten of one failure, and two others.
async fn full() -> Shop {
    let shop = Shop::open().await;
    let begin = SystemTime::now() - Duration::from_secs(3_600);
    for number in 0..10 {
        let (id, error) = (
            format!("ship-{number}"),
            format!("order {number} not found"),
        );
        let letter = Letter {
            id: &id,
            error: &error,
            died_at: begin + Duration::from_secs(number),
            ..Letter::default()
        };
        shop.dies("normal", &letter).await;
    }
    for (id, error) in [("pay-1", "card 'x' declined"), ("pay-2", "<b>O'Brien</b>")] {
        let letter = Letter {
            task: "order.pay",
            id,
            error,
            reason: "permanent error",
            died_at: begin - Duration::from_secs(86_400),
            ..Letter::default()
        };
        shop.dies("critical", &letter).await;
    }
    let collecting = shop.collect();
    shop.logged(12).await;
    collecting.stop().await;
    shop
}

#[tokio::test]
async fn every_filter_finds_what_it_says() {
    let shop = full().await;
    let letters = &shop.letters;
    let today = SystemTime::now() - Duration::from_secs(7_200);
    let long_ago = SystemTime::UNIX_EPOCH;
    let any = Filter::default;
    for (filter, count) in [
        (any(), 12),
        (any().tier("normal"), 10),
        (any().tier("unrouted"), 0),
        (any().task("order.pay"), 2),
        (any().reason(Reason::Permanent), 2),
        (any().state(State::Dead), 12),
        (any().state(State::Redriven), 0),
        (any().since(today), 10),
        (any().until(today), 2),
        (any().since(long_ago).text("ORDER 7 NOT"), 1),
        (any().since(today).text("declined"), 0),
        (any().since(long_ago).text("<b>O'Brien</b>"), 1),
        (any().since(long_ago).text("%"), 0),
        (any().since(long_ago).text("pay-2"), 1),
        (any().since(long_ago).text("\"order\""), 12),
        (any().task("x' OR '1'='1"), 0),
        (
            any().fingerprint("'; DROP TABLE tierline.dead_letters; --"),
            0,
        ),
    ] {
        let listed = letters.list(&filter, Page::default()).await.unwrap();
        assert_eq!(listed.letters.len(), count, "{filter:?}");
        assert_eq!(letters.count(&filter).await.unwrap(), count as u64);
    }
}

#[tokio::test]
async fn pages_show_every_row_once_and_the_newest_first() {
    let shop = full().await;
    let mut page = Page::first(5);
    let mut seen = Vec::new();
    loop {
        let listed = shop.letters.list(&Filter::default(), page).await.unwrap();
        seen.extend(listed.letters);
        match listed.next {
            Some(next) => page = Page::after(5, next.to_string().parse().unwrap()),
            None => break,
        }
    }
    assert_eq!(seen.len(), 12);
    assert!(seen.is_sorted_by_key(|row| std::cmp::Reverse((row.died_at, row.id))));
}

#[tokio::test]
async fn groups_count_failures_that_are_the_same_and_say_what_to_do() {
    let shop = full().await;
    let groups = shop.letters.groups(&Filter::default(), 10).await.unwrap();
    assert_eq!(groups.len(), 3);
    let largest = &groups[0];
    assert_eq!(largest.count, 10);
    let span = largest.last_seen.duration_since(largest.first_seen);
    assert_eq!(span.unwrap(), Duration::from_secs(9));
    assert_eq!(largest.sample.fingerprint, largest.fingerprint);
    assert_eq!(largest.assessment.root_cause, RootCause::BadData);
    assert_eq!(largest.advice(), Advice::FixFirst);
    let of_group = Filter::default().fingerprint(&largest.fingerprint);
    assert_eq!(shop.letters.count(&of_group).await.unwrap(), 10);
}

#[tokio::test]
async fn counts_by_tier_follow_every_change() {
    let shop = full().await;
    let letters = &shop.letters;
    let counts = async || {
        let counts = letters.by_tier().await.unwrap();
        let counts = counts.into_iter();
        counts
            .map(|tier| {
                (
                    tier.tier,
                    [tier.dead, tier.redriving, tier.redriven, tier.discarded],
                )
            })
            .collect::<Vec<_>>()
    };
    let row = |tier: &str, counts| (tier.to_owned(), counts);
    let begin = [
        row("critical", [2, 0, 0, 0]),
        row("normal", [10, 0, 0, 0]),
        row("small", [0; 4]),
    ];
    assert_eq!(counts().await, begin);
    let page = Page::default();
    let listed = letters.list(&Filter::default().tier("normal"), page).await;
    let rows = listed.unwrap().letters;
    letters.redrive(rows[0].id).await.unwrap();
    letters.discard(rows[1].id).await.unwrap();
    letters
        .purge(&Filter::default().tier("critical"))
        .await
        .unwrap();
    let end = [
        row("critical", [0; 4]),
        row("normal", [8, 0, 1, 1]),
        row("small", [0; 4]),
    ];
    assert_eq!(counts().await, end);
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_and_another_apps_rows_are_not_there() {
    let shop = full().await;
    let letters = &shop.letters;
    let invalid = |error: Error| {
        assert!(
            matches!(
                error,
                Error::DeadLetter(DeadLetterError::InvalidFilter { .. })
            ),
            "{error}"
        )
    };
    for size in [0, Page::LARGEST + 1] {
        let page = Page::first(size);
        invalid(letters.list(&Filter::default(), page).await.unwrap_err());
        invalid(letters.groups(&Filter::default(), size).await.unwrap_err());
    }
    let text = Filter::default().text("x");
    invalid(letters.list(&text, Page::default()).await.unwrap_err());
    invalid(letters.purge(&text).await.unwrap_err());
    for id in [0, -1, i64::MAX] {
        let error = letters.get(id).await.unwrap_err();
        assert!(
            matches!(error, Error::DeadLetter(DeadLetterError::NotFound { .. })),
            "{error}"
        );
    }

    let map = super::support::MAP.replace("\"shop\"", "\"other\"");
    let (other, _) = super::support::connect(&shop.vhost, shop.database.url(), &map).await;
    let others = other.dead_letters().unwrap();
    assert_eq!(others.count(&Filter::default()).await.unwrap(), 0);
    let id = shop.logged(12).await[0].id;
    assert!(others.get(id).await.is_err());
    assert!(others.redrive(id).await.is_err());
    assert!(others.discard(id).await.is_err());
    others.purge(&Filter::default()).await.unwrap();
    assert_eq!(letters.count(&Filter::default()).await.unwrap(), 12);
}
