#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::task;

#[derive(Serialize, Deserialize)]
struct Job;

#[task(name = email)]
async fn name(job: Job) {}

#[task(name = "")]
async fn empty_name(job: Job) {}

#[task(name = "a", name = "b")]
async fn two_names(job: Job) {}

#[task(retries = "five")]
async fn retries(job: Job) {}

#[task(retries = 99999999999)]
async fn too_many_retries(job: Job) {}

#[task(jitter)]
async fn jitter(job: Job) {}

#[task(blocking = true)]
fn blocking(job: Job) {}

fn main() {}
