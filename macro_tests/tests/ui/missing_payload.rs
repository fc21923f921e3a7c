#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{Context, TaskError, task};

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

#[task(name = "email.send_otp")]
async fn send_otp() -> Result<(), TaskError> {
    Ok(())
}

#[task(name = "email.send_receipt")]
async fn send_receipt(cx: Context) -> Result<(), TaskError> {
    Ok(())
}

#[task(name = "email.send_reminder")]
async fn send_reminder(cx: Context, otp: SendOtp) -> Result<(), TaskError> {
    Ok(())
}

fn main() {}
