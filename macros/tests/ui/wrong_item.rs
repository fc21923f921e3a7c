#![allow(unused)]

use tierline::{Task, task};

#[task(name = "email.send_otp")]
struct SendOtp;

#[derive(Task)]
struct WithoutName;

#[derive(Task)]
#[task(name = "with.options", retries = 5)]
struct WithOptions;

#[derive(Task)]
#[task(name = "generic")]
struct Generic<T>(T);

fn main() {}
