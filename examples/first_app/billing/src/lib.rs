//! A crate of its own with a contract and its handler, which `first_app` only publishes to.

use serde::{Deserialize, Serialize};
use tierline::{Context, Task, TaskError, task};

/// Charges a guest.
#[derive(Debug, Clone, Serialize, Deserialize, Task)]
#[task(name = "billing.charge")]
pub struct Charge {
    /// Who pays.
    pub guest: String,
    /// How much, in cents.
    pub cents: u64,
}

#[task(retries = 8, backoff = "5s", timeout = "30s")]
async fn charge(charge: Charge, cx: Context) -> Result<(), TaskError> {
    if charge.cents == 0 {
        return Err(TaskError::permanent("there is nothing to charge"));
    }
    println!("{}: {} owes {} cents", cx.id(), charge.guest, charge.cents);
    Ok(())
}
