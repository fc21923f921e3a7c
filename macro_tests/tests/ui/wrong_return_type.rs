#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{TaskError, task};

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

#[task(name = "email.send_otp")]
async fn send_otp(otp: SendOtp) -> Result<u32, TaskError> {
    Ok(1)
}

fn main() {}
