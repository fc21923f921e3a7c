#![allow(unused)]

use tierline::{TaskError, task};

struct SendOtp {
    phone: String,
}

#[task(name = "email.send_otp")]
async fn send_otp(otp: SendOtp) -> Result<(), TaskError> {
    Ok(())
}

fn main() {}
