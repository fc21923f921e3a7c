#![allow(unused)]

use tierline::{Task, task};

#[task(name = "email.send_otp")]
struct SendOtp;

// Nothing is added to what the compiler says of a function that is still being written.
#[task(name = "email.half_written")]
async fn half_written(otp: SendOtp) {
    let code = ;
}

#[derive(Task)]
struct WithoutName;

#[derive(Task)]
#[task(name = "with.options", retries = 5)]
struct WithOptions;

#[derive(Task)]
#[task(name = "generic")]
struct Generic<T>(T);

fn main() {}
