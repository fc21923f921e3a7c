#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{TaskError, task};

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

#[task(name = "email.send_otp", retry = 5)]
async fn send_otp(otp: SendOtp) -> Result<(), TaskError> {
    Ok(())
}

fn main() {}
