use std::future::Future;
use std::pin::Pin;

use super::{Context, IntoOutcome, Outcome, TaskError};

/// A running handler.
pub type OutcomeFuture = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// Runs a task: an async function of the payload, or of the payload and the [`Context`], that returns an
/// [`IntoOutcome`].
///
/// Closures that capture values are handlers too. `Marker` distinguishes the shapes for the
/// compiler; it is always inferred.
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use tierline::{Context, Registry, Task, TaskError};
///
/// # #[derive(Serialize, Deserialize)]
/// # struct Greet { name: String }
/// # impl Task for Greet { const NAME: &'static str = "greet"; }
/// # #[derive(Serialize, Deserialize)]
/// # struct Count;
/// # impl Task for Count { const NAME: &'static str = "count"; }
/// async fn greet(greet: Greet, cx: Context) -> Result<(), TaskError> {
///     println!("{}, for the {}th time", greet.name, cx.attempt());
///     Ok(())
/// }
///
/// let mut registry = Registry::new();
/// registry.register::<Greet, _>(greet)?;
/// registry.register::<Count, _>(|_: Count| async { println!("one, two, three") })?;
/// # Ok::<(), tierline::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "this is no handler for the payload `{T}`",
    label = "not `async fn({T})` and not `async fn({T}, Context)`",
    note = "a handler is an async function of the payload, with `Context` as an optional second argument, that returns `Result<(), TaskError>`",
    note = "its future must be `Send`; a plain function is wrapped in `tierline::task::blocking(…)`"
)]
pub trait Handler<T, Marker>: Send + Sync + 'static {
    /// Starts the handler.
    fn call(&self, payload: T, context: Context) -> OutcomeFuture;
}

impl<T, F, Running> Handler<T, marker::PayloadAlone> for F
where
    F: Fn(T) -> Running + Send + Sync + 'static,
    Running: Future<Output: IntoOutcome> + Send + 'static,
{
    fn call(&self, payload: T, _context: Context) -> OutcomeFuture {
        run(self(payload))
    }
}

impl<T, F, Running> Handler<T, marker::PayloadAndContext> for F
where
    F: Fn(T, Context) -> Running + Send + Sync + 'static,
    Running: Future<Output: IntoOutcome> + Send + 'static,
{
    fn call(&self, payload: T, context: Context) -> OutcomeFuture {
        run(self(payload, context))
    }
}

/// A plain function as a handler; made by [`blocking`].
#[derive(Debug, Clone, Copy)]
pub struct Blocking<F>(F);

/// Makes a handler of a plain function that computes or blocks: it runs on its own thread, off
/// the async ones.
///
/// A thread cannot be interrupted. Past the hard limit the attempt has failed and may be repeated
/// while the function still runs, so a long one should check [`Context::is_cancelled`], which the
/// soft limit sets.
///
/// ```
/// use tierline::task::blocking;
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)]
/// # struct Resize { path: String }
/// # impl tierline::Task for Resize { const NAME: &'static str = "resize"; }
///
/// fn resize(image: Resize) -> Result<(), tierline::TaskError> {
///     std::fs::read(image.path)?;
///     Ok(())
/// }
///
/// let mut registry = tierline::Registry::new();
/// registry.register::<Resize, _>(blocking(resize))?;
/// # Ok::<(), tierline::Error>(())
/// ```
pub fn blocking<F>(function: F) -> Blocking<F> {
    Blocking(function)
}

impl<T, F, Returned> Handler<T, marker::PayloadAlone> for Blocking<F>
where
    T: Send + 'static,
    F: Fn(T) -> Returned + Clone + Send + Sync + 'static,
    Returned: IntoOutcome,
{
    fn call(&self, payload: T, _context: Context) -> OutcomeFuture {
        let function = self.0.clone();
        run_blocking(move || function(payload))
    }
}

impl<T, F, Returned> Handler<T, marker::PayloadAndContext> for Blocking<F>
where
    T: Send + 'static,
    F: Fn(T, Context) -> Returned + Clone + Send + Sync + 'static,
    Returned: IntoOutcome,
{
    fn call(&self, payload: T, context: Context) -> OutcomeFuture {
        let function = self.0.clone();
        run_blocking(move || function(payload, context))
    }
}

/// Erases the type of an async handler's future.
pub fn run(running: impl Future<Output: IntoOutcome> + Send + 'static) -> OutcomeFuture {
    Box::pin(async move { running.await.into_outcome() })
}

/// Runs a plain handler off the async threads.
pub fn run_blocking<R: IntoOutcome>(
    function: impl FnOnce() -> R + Send + 'static,
) -> OutcomeFuture {
    Box::pin(async move {
        match tokio::task::spawn_blocking(|| function().into_outcome()).await {
            Ok(outcome) => outcome,
            Err(stopped) => match stopped.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(stopped) => Outcome::Retry(TaskError::from(stopped)),
            },
        }
    })
}

/// The shapes of a handler.
mod marker {
    pub struct PayloadAlone;
    pub struct PayloadAndContext;
}

/// Only [`Context`]; lets the macro point at a second argument that is something else.
#[diagnostic::on_unimplemented(
    message = "the second argument of a task handler is `Context`, not `{Self}`",
    label = "not `tierline::Context`",
    note = "a handler takes one payload: put both values into one struct, and derive `Serialize` and `Deserialize` for it"
)]
pub trait SecondArgument {
    /// The argument.
    fn from_context(context: Context) -> Self;
}

impl SecondArgument for Context {
    fn from_context(context: Context) -> Self {
        context
    }
}
