#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{TaskError, task};

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

#[task(name = "email.send_otp", blocking)]
async fn send_otp(otp: SendOtp) -> Result<(), TaskError> {
    Ok(())
}

fn main() {}
