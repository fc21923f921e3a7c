#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{Context, TaskError, task};

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

#[derive(Serialize, Deserialize)]
struct Code(u32);

#[task(name = "email.send_otp")]
async fn send_otp(otp: SendOtp, code: Code) -> Result<(), TaskError> {
    Ok(())
}

#[task(name = "email.send_code")]
async fn send_code(code: Code, cx: Context, otp: SendOtp) -> Result<(), TaskError> {
    Ok(())
}

#[task(name = "email.pair")]
async fn pair(pair: (SendOtp, Code)) -> Result<(), TaskError> {
    Ok(())
}

fn main() {}
