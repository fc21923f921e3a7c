//! Tasks, their handlers, and the outcomes that a handler can return.
//!
//! The payload type is the contract. A service that only publishes needs the type, a worker also
//! needs the handler:
//!
//! ```
//! use serde::{Deserialize, Serialize};
//! # #[cfg(feature = "macros")] mod app {
//! # use serde::{Deserialize, Serialize};
//! use tierline::{Context, TaskError, task};
//!
//! #[derive(Serialize, Deserialize)]
//! struct SendOtp {
//!     phone: String,
//!     code: String,
//! }
//!
//! #[task(name = "docs.send_otp", retries = 5, timeout = "20s")]
//! async fn send_otp(otp: SendOtp, cx: Context) -> Result<(), TaskError> {
//!     println!("attempt {}: {} to {}", cx.attempt(), otp.code, otp.phone);
//!     Ok(())
//! }
//! # }
//! ```
//!
//! # Without the macro
//!
//! `#[task]` generates code that you could write by hand: an implementation of [`Task`], and the
//! registration of the handler with its [`TaskOptions`].
//!
//! ```
//! use serde::{Deserialize, Serialize};
//! use tierline::{Registry, Task, TaskError, TaskOptions};
//!
//! #[derive(Serialize, Deserialize)]
//! struct SendOtp {
//!     phone: String,
//!     code: String,
//! }
//!
//! impl Task for SendOtp {
//!     const NAME: &'static str = "docs.send_otp";
//! }
//!
//! async fn send_otp(otp: SendOtp) -> Result<(), TaskError> {
//!     println!("{} to {}", otp.code, otp.phone);
//!     Ok(())
//! }
//!
//! let mut registry = Registry::new();
//! registry.register_with::<SendOtp, _>(send_otp, TaskOptions::new().retries(5))?;
//! # Ok::<(), tierline::Error>(())
//! ```
//!
//! # How handlers are found
//!
//! [`Registry::collected`] has every `#[task]` handler of every crate that is linked into the
//! program, without a list to maintain. The [`inventory`] crate collects them: each handler
//! registers itself in a constructor that runs before `main`. Handlers can be missing in these cases:
//!
//! - **A crate that is never mentioned is not linked.** Naming it in `Cargo.toml` is not enough.
//!   If you use only the handlers of a crate, write `use that_crate as _;`. This includes
//!   a file in `tests/` that checks the handlers of its own package.
//! - **A Rust `staticlib` that a C program links** keeps only the object files that the program
//!   refers to, unless the linker is told `--whole-archive` (or `-force_load`).
//! - **WebAssembly** may need the host to call `__wasm_call_ctors`; `inventory` says when.
//! - **The Cranelift backend on macOS** ran no constructors before `inventory`'s issue 82 was
//!   resolved; keep that crate current.
//!
//! [`assert_every_task_is_mapped`] fails if it finds no handler at
//! all, and its strict form fails for any mapped task whose handler is missing. If you cannot rely on
//! the collection, register by hand as above.
//!
//! # Two tasks of one name
//!
//! | mistake | found by |
//! |---|---|
//! | one name given twice within a crate, by `#[task(name)]` or `#[derive(Task)]` | the compiler |
//! | two names for one payload type | the compiler |
//! | two handlers of one payload type | [`Registry::collected`], the sentinel |
//! | one name in two crates | [`Registry::collected`], the sentinel |
//! | a handler registered by hand under a name that is taken | [`Registry::register`] |

mod cancellation;
mod context;
mod data;
mod ending;
mod error;
mod handler;
mod id;
#[cfg(feature = "tower")]
mod layer;
mod middleware;
mod options;
mod outcome;
mod publish;
mod registry;
mod retry;
mod sentinel;
mod transaction;
mod unique;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::topology::duration::IntoDuration;
pub use cancellation::{CancelReason, Cancellation};
pub use context::Context;
pub(crate) use context::ContextParts;
pub(crate) use data::Data;
pub use ending::TaskEnding;
pub(crate) use error::ErrorAdvice;
pub use error::TaskError;
pub use handler::{Blocking, Handler, OutcomeFuture, blocking};
pub use id::TaskId;
#[cfg(feature = "tower")]
pub use layer::{Layered, NextService, layer};
pub(crate) use middleware::{AddedMiddleware, Handling, MiddlewareChains};
pub use middleware::{Attempt, Middleware, Next};
pub use options::TaskOptions;
pub use outcome::{IntoOutcome, Outcome};
pub use publish::{Publish, PublishBuilder, PublishFuture, PublishRequest, Receipt};
pub use registry::{Registration, Registry};
pub use retry::RetryPolicy;
pub use sentinel::{
    Sentinel, SentinelReport, assert_every_task_is_mapped, assert_every_task_is_mapped_strictly,
};
#[cfg(feature = "postgres")]
pub use transaction::TaskTransaction;
#[cfg(feature = "postgres")]
pub(crate) use transaction::{AttemptTransactions, OpenTransaction};
pub(crate) use transaction::{TransactionUse, Transactions};
pub(crate) use unique::KeyClaim;
pub use unique::{IdempotencyKey, MAX_KEY, TaskKey, Unique};

/// Items that `#[task]` expands to.
pub(crate) mod expansion {
    pub use super::handler::{SecondArgument, run, run_blocking};
    pub use super::registry::{Collected, registration};
}

/// A payload type: the contract between the publishers of a task and its handler.
///
/// It has the name under which the map lists the task, and is sent as JSON. Implement it with
/// `#[task(name = "…")]` on the handler, with `#[derive(Task)]` on the type if the
/// contract has its own crate, or by hand:
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use tierline::Task;
///
/// #[derive(Serialize, Deserialize)]
/// struct SendOtp {
///     phone: String,
/// }
///
/// impl Task for SendOtp {
///     const NAME: &'static str = "email.send_otp";
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the payload of a task",
    label = "not a task's payload",
    note = "name the task with `#[task(name = \"…\")]` on its handler, or with `#[derive(Task)]` and `#[task(name = \"…\")]` on `{Self}`"
)]
pub trait Task: Payload {
    /// The task's name in the map, for example `email.send_otp`.
    const NAME: &'static str;
}

/// A type that serde can serialize and deserialize, and that owns its values.
///
/// Implemented for all such types.
pub trait Payload: Serialize + DeserializeOwned + Send + Sync + 'static {}

impl<T: Serialize + DeserializeOwned + Send + Sync + 'static> Payload for T {}
