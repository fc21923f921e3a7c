#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{TaskError, task};

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

#[task(name = "email.send_otp")]
async fn send_otp(otp: SendOtp) -> Result<(), TaskError> {
    Ok(())
}

mod elsewhere {
    #[derive(serde::Serialize, serde::Deserialize, tierline::Task)]
    #[task(name = "email.send_otp")]
    struct SendPassword;
}

fn main() {}
