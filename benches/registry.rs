//! What the registry costs: a handler looked up among 1,000 and called through it, against the same
//! function called directly. Both decode the same payload.
//!
//! ```sh
//! cargo bench --bench registry
//! ```

#![allow(clippy::unwrap_used)] // a benchmark that cannot run should stop

use std::hint::black_box;
use std::pin::pin;
use std::task::Waker;

use criterion::{Criterion, criterion_group, criterion_main};
use serde::{Deserialize, Serialize};
use tierline::testing::Tester;
use tierline::{Context, Registry, Task, TaskError};

/// A type for every number of three digits.
#[derive(Serialize, Deserialize)]
struct Numbered<const A: u8, const B: u8, const C: u8> {
    value: u64,
}

impl<const A: u8, const B: u8, const C: u8> Numbered<A, B, C> {
    const TEXT: [u8; 10] = *b"bench.task";
    const BYTES: [u8; 13] = {
        let mut bytes = [b'0'; 13];
        let mut index = 0;
        while index < Self::TEXT.len() {
            bytes[index] = Self::TEXT[index];
            index += 1;
        }
        bytes[10] += A;
        bytes[11] += B;
        bytes[12] += C;
        bytes
    };
}

impl<const A: u8, const B: u8, const C: u8> Task for Numbered<A, B, C> {
    const NAME: &'static str = match str::from_utf8(&Self::BYTES) {
        Ok(name) => name,
        Err(_) => panic!("digits are text"),
    };
}

async fn handle<const A: u8, const B: u8, const C: u8>(
    task: Numbered<A, B, C>,
    cx: Context,
) -> Result<(), TaskError> {
    black_box((task.value, cx.attempt()));
    Ok(())
}

macro_rules! for_each_digit {
    ($next:ident $($given:tt)*) => {
        $next!($($given)* 0); $next!($($given)* 1); $next!($($given)* 2); $next!($($given)* 3);
        $next!($($given)* 4); $next!($($given)* 5); $next!($($given)* 6); $next!($($given)* 7);
        $next!($($given)* 8); $next!($($given)* 9);
    };
}

macro_rules! register_hundred {
    ($registry:ident $a:literal) => { for_each_digit!(register_ten $registry $a) };
}

macro_rules! register_ten {
    ($registry:ident $a:literal $b:literal) => { for_each_digit!(register_one $registry $a $b) };
}

macro_rules! register_one {
    ($registry:ident $a:literal $b:literal $c:literal) => {
        $registry
            .register::<Numbered<$a, $b, $c>, _>(handle::<$a, $b, $c>)
            .unwrap();
    };
}

fn thousand_tasks() -> Registry {
    let mut registry = Registry::new();
    for_each_digit!(register_hundred registry);
    assert_eq!(registry.iter().count(), 1_000);
    registry
}

fn run_to_completion<T>(future: impl Future<Output = T>) -> T {
    let mut waker = std::task::Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut waker) {
        std::task::Poll::Ready(output) => output,
        std::task::Poll::Pending => panic!("the handler waits for nothing"),
    }
}

fn calls(criterion: &mut Criterion) {
    type Called = Numbered<5, 0, 7>;
    let registry = thousand_tasks();
    let payload = br#"{"value":12}"#;
    let tester = Tester::builder().registry(thousand_tasks()).build();
    let context = tester.context(&tester.message(&Called { value: 12 }));

    criterion.bench_function("a function, called directly", |bencher| {
        bencher.iter(|| {
            let task: Called = serde_json::from_slice(black_box(payload)).unwrap();
            run_to_completion(handle(task, context.clone())).unwrap();
        });
    });
    criterion.bench_function("the same, looked up among 1,000 and called", |bencher| {
        bencher.iter(|| {
            let handler = registry.get(black_box(Called::NAME)).unwrap();
            run_to_completion(handler.call(black_box(payload), context.clone()).unwrap())
        });
    });
}

criterion_group!(benches, calls);
criterion_main!(benches);
