#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{TaskError, task};

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

#[task(name = "email.send_otp")]
async fn send_otp(otp: SendOtp) -> Result<(), TaskError> {
    let shared = std::rc::Rc::new(otp.phone);
    std::future::ready(()).await;
    drop(shared);
    Ok(())
}

fn main() {}
