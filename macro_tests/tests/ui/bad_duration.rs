#![allow(unused)]

use serde::{Deserialize, Serialize};
use tierline::task;

#[derive(Serialize, Deserialize)]
struct Job;

#[task(name = "unit", timeout = "20 parsecs")]
async fn unknown_unit(job: Job) {}

#[task(name = "number", timeout = 20)]
async fn a_number(job: Job) {}

#[task(name = "missing", timeout = "20")]
async fn missing_unit(job: Job) {}

#[task(name = "months", backoff_max = "5M")]
async fn months(job: Job) {}

#[task(name = "zero", timeout = "0s")]
async fn zero(job: Job) {}

#[task(name = "soft", timeout = "20s", soft_timeout = "30s")]
async fn soft_above_hard(job: Job) {}

#[task(name = "soft_alone", soft_timeout = "10m")]
async fn soft_above_the_default(job: Job) {}

fn main() {}
