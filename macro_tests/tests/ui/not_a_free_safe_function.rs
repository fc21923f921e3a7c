#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{TaskError, task};

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

struct Mailer;

impl Mailer {
    #[task(name = "email.send_otp")]
    async fn send_otp(&self, otp: SendOtp) -> Result<(), TaskError> {
        Ok(())
    }
}

#[task(name = "email.unsafe")]
async unsafe fn dangerous(otp: SendOtp) {}

fn main() {}
