//! A small hotel: a booking is taken, charged by another crate, and confirmed by email.

use std::sync::Mutex;

use first_app_billing::Charge;
use serde::{Deserialize, Serialize};
use tierline::{Context, Outcome, TaskError, task};

/// What a night costs, in cents.
pub const NIGHT: u64 = 9_900;

/// Books a room.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Book {
    /// Who stays.
    pub guest: String,
    /// For how many nights.
    pub nights: u64,
}

/// Confirms a booking by email.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Confirm {
    /// Who stays.
    pub guest: String,
}

/// Where emails go.
#[derive(Debug, Default)]
pub struct Mailer {
    /// What was sent so far.
    pub sent: Mutex<Vec<String>>,
}

#[task(name = "room.book", timeout = "10s")]
async fn book(booking: Book, cx: Context) -> Result<Outcome, TaskError> {
    if booking.nights == 0 {
        return Ok(Outcome::discard("a stay of no nights"));
    }
    cx.publish(Charge {
        guest: booking.guest.clone(),
        cents: booking.nights * NIGHT,
    })
    .await?;
    cx.publish(Confirm {
        guest: booking.guest,
    })
    .delay("5m")
    .await?;
    Ok(Outcome::Done)
}

#[task(name = "email.confirm", retries = 5)]
async fn confirm(confirm: Confirm, cx: Context) -> Result<(), TaskError> {
    let mut sent = cx
        .data::<Mailer>()
        .sent
        .lock()
        .map_err(|_| "the mailer is broken")?;
    sent.push(format!("Dear {}, your room is ready.", confirm.guest));
    Ok(())
}
