#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{TaskError, task};

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

#[task(name = "email.send_otp")]
async fn send_otp<T: Into<SendOtp>>(otp: T) -> Result<(), TaskError> {
    Ok(())
}

#[task(name = "email.borrowed")]
async fn borrowed(otp: &SendOtp) -> Result<(), TaskError> {
    Ok(())
}

#[task(name = "email.abstract")]
async fn abstracted(otp: impl Into<SendOtp>) -> Result<(), TaskError> {
    Ok(())
}

#[derive(Serialize, Deserialize)]
struct Greet;

#[task(name = "email.greet")]
async fn abstract_context(greet: Greet, cx: impl Send) -> Result<(), TaskError> {
    Ok(())
}

fn main() {}
