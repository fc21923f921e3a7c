#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::{Task, task};

#[derive(Serialize, Deserialize)]
struct Job;

#[task(name = email)]
async fn name(job: Job) {}

#[task("email.send_otp")]
async fn name_without_key(job: Job) {}

#[task(name("email.send_otp"))]
async fn name_in_parentheses(job: Job) {}

#[task(name = "")]
async fn empty_name(job: Job) {}

#[task(name = "a", name = "b")]
async fn two_names(job: Job) {}

#[task(timeout = "20s", r#timeout = "30s")]
async fn two_timeouts(job: Job) {}

#[derive(Serialize, Deserialize, Task)]
#[task(name = "a")]
#[task(name = "b")]
struct TwoNames;

#[task(retries = "five")]
async fn retries(job: Job) {}

#[task(retries = -1)]
async fn negative_retries(job: Job) {}

#[task(retries = 99999999999)]
async fn too_many_retries(job: Job) {}

#[task(backoff = "1h")]
async fn backoff_above_the_default_maximum(job: Job) {}

#[task(backoff = "10s", backoff_max = "5s")]
async fn backoff_above_its_maximum(job: Job) {}

#[task(jitter)]
async fn jitter(job: Job) {}

#[task(blocking = true)]
fn blocking(job: Job) {}

fn main() {}
