//! The macros of [tierline](https://docs.rs/tierline); use them through that crate.
//!
//! They are sugar: you can write by hand everything that they generate, and `#[task]` leaves its function
//! unchanged.

mod expand;
mod name;
mod options;
mod signature;

use proc_macro::TokenStream;

// The documentation is in files of their own because its examples are tested in `macro_tests`.

#[doc = include_str!("task.md")]
#[proc_macro_attribute]
pub fn task(options: TokenStream, function: TokenStream) -> TokenStream {
    expand::handler(options.into(), function.into()).into()
}

#[doc = include_str!("task_payload.md")]
#[proc_macro_derive(Task, attributes(task))]
pub fn derive_task(input: TokenStream) -> TokenStream {
    expand::contract(input.into()).into()
}
