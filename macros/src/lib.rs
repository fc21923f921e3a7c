//! The macros of [tierline](https://docs.rs/tierline); use them through that crate.
//!
//! They are sugar: you can write by hand everything that they generate, and `#[task]` leaves its function
//! unchanged.

mod expand;
mod name;
mod options;
mod signature;

use proc_macro::TokenStream;

/// Makes an async function the handler of a task.
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use tierline::{Context, TaskError, task};
/// # struct Sms;
/// # impl Sms { async fn send(&self, _: &str, _: &str) -> std::io::Result<()> { Ok(()) } }
///
/// #[derive(Serialize, Deserialize)]
/// struct SendOtp {
///     phone: String,
///     code: String,
/// }
///
/// #[task(name = "email.send_otp", retries = 5, timeout = "20s")]
/// async fn send_otp(otp: SendOtp, cx: Context) -> Result<(), TaskError> {
///     cx.data::<Sms>().send(&otp.phone, &otp.code).await?;
///     Ok(())
/// }
/// ```
///
/// The function takes its payload by value, and optionally the `Context` as a second argument.
/// It returns `Result<(), TaskError>`, or any other `IntoOutcome`. The macro leaves it
/// unchanged, implements `Task` for the payload, and adds the handler to `Registry::collected`.
///
/// | option | meaning | default |
/// |---|---|---|
/// | `name = "email.send_otp"` | the task's name in the map; omitted if the payload has `#[derive(Task)]` | |
/// | `retries = 5` | how many times it runs again after the first attempt; 0 for never | 3 |
/// | `backoff = "1s"` | the delay before the first retry, doubled for each one after it | `"1s"` |
/// | `backoff_max = "10m"` | the longest delay | `"10m"` |
/// | `jitter = false` | whether delays are drawn from their upper half | `true` |
/// | `timeout = "20s"` | the hard limit, at which the attempt is dropped and fails | `"6m"` |
/// | `soft_timeout = "15s"` | the soft limit, at which the context is cancelled | 5/6 of `timeout` |
/// | `blocking` | for a plain `fn`, which runs off the async threads | |
/// | `crate = "path"` | the path of tierline, if it was renamed or re-exported | `"::tierline"` |
///
/// Two tasks with the same name in one crate do not compile.
#[proc_macro_attribute]
pub fn task(options: TokenStream, function: TokenStream) -> TokenStream {
    expand::handler(options.into(), function.into()).into()
}

/// Makes a type the payload of a task, for a contract in a crate of its own.
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use tierline::{Task, task};
///
/// #[derive(Serialize, Deserialize, Task)]
/// #[task(name = "email.send_reminder")]
/// pub struct SendReminder {
///     pub guest: String,
/// }
///
/// #[task]
/// async fn send_reminder(reminder: SendReminder) {
///     println!("Dear {}, we expect you tomorrow.", reminder.guest);
/// }
/// ```
///
/// Publishers need only the type. The handler, in any crate, has `#[task]`
/// without a name. Besides `name` there is `crate = "path"`, as for the handler.
#[proc_macro_derive(Task, attributes(task))]
pub fn derive_task(input: TokenStream) -> TokenStream {
    expand::contract(input.into()).into()
}
