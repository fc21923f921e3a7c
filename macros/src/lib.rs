//! The macros of [tierline](https://docs.rs/tierline); use them through that crate.
//!
//! They are sugar: you can write by hand everything that they generate, and `#[task]` leaves its function
//! unchanged.

mod expand;
mod name;
mod options;
mod signature;

use proc_macro::TokenStream;

// The examples of the documentation are tested in `macro_tests`.

#[cfg_attr(not(doctest), doc = include_str!("task.md"))]
#[proc_macro_attribute]
pub fn task(options: TokenStream, function: TokenStream) -> TokenStream {
    expand::handler(options.into(), function.into()).into()
}

#[cfg_attr(not(doctest), doc = include_str!("task_payload.md"))]
#[proc_macro_derive(Task, attributes(task))]
pub fn derive_task(input: TokenStream) -> TokenStream {
    expand::contract(input.into()).into()
}
