use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};

use super::handler::run;
use super::registry::ErasedHandler;
use super::{Context, IntoOutcome, Outcome, OutcomeFuture, Registration, TaskError};
use crate::error::Error;
use crate::error::WorkerError;
use crate::topology::{Topology, near_miss};

/// Code that runs around handlers: an async function of the [`Attempt`] and of [`Next`], which runs the
/// rest.
///
/// ```
/// use std::time::Duration;
/// use tierline::task::{Attempt, Next};
/// use tierline::{Outcome, Tierline, Topology};
/// use tokio::time::timeout;
/// use tracing::Instrument;
///
/// // Puts a span around the attempt.
/// async fn trace(attempt: Attempt, next: Next) -> Outcome {
///     let tenant = attempt.context().header("tenant").unwrap_or("none");
///     let span = tracing::info_span!("tenant", tenant);
///     next.run(attempt).instrument(span).await
/// }
///
/// // Refuses the task before its payload is decoded.
/// async fn check_permission(attempt: Attempt, next: Next) -> Outcome {
///     match attempt.context().header("tenant") {
///         Some(_) => next.run(attempt).await,
///         None => Outcome::dead("the task names no tenant"),
///     }
/// }
///
/// // Replaces the outcome: a slow call runs again later, at no cost of an attempt.
/// async fn give_way(attempt: Attempt, next: Next) -> Outcome {
///     match timeout(Duration::from_secs(5), next.run(attempt)).await {
///         Ok(outcome) => outcome,
///         Err(_) => Outcome::Snooze(Duration::from_secs(60)),
///     }
/// }
///
/// # fn example(topology: Topology) {
/// let builder = Tierline::builder(topology)
///     .middleware(trace)
///     .group_middleware("urgent", give_way)
///     .task_middleware("invoice.delete", check_permission);
/// # }
/// ```
///
/// A middleware of the app is outermost, then follow those of the group, then those of the task. Among
/// several of the same kind, the one that was added first is outermost. Closures that capture what they
/// need are middleware too. A `tower` layer becomes one with `task::layer` (feature `tower`).
///
/// The task's soft and hard limits cover its middleware as well: [`Context::time_left`] counts for both. A
/// panic of the handler unwinds through its middleware, and a panic of a middleware costs one attempt, like a
/// handler's. At the hard limit, middleware and handler are dropped together.
///
/// A middleware is not called for a task that has expired or has no handler.
#[diagnostic::on_unimplemented(
    message = "this is no middleware",
    label = "not `async fn(Attempt, Next)`",
    note = "a middleware is an async function of `Attempt` and `Next` that returns what a handler may return, for example an `Outcome`",
    note = "its future must be `Send`; a `tower` layer is wrapped in `tierline::task::layer(…)` (feature `tower`)"
)]
pub trait Middleware: Send + Sync + 'static {
    /// Starts the middleware.
    fn call(&self, attempt: Attempt, next: Next) -> OutcomeFuture;
}

impl<F, Running> Middleware for F
where
    F: Fn(Attempt, Next) -> Running + Send + Sync + 'static,
    Running: Future<Output: IntoOutcome> + Send + 'static,
{
    fn call(&self, attempt: Attempt, next: Next) -> OutcomeFuture {
        run(self(attempt, next))
    }
}

/// One attempt of a task, before its payload is decoded: what a [`Middleware`] is given and hands on.
pub struct Attempt {
    context: Context,
    payload: Vec<u8>,
    /// What the innermost service of a `tower` layer runs.
    #[cfg(feature = "tower")]
    pub(super) next: Option<Next>,
}

impl Attempt {
    /// The context that the handler will be given: the task's name, id, tier, headers and so on. It is
    /// cheap to clone, for what a middleware does after [`Next::run`].
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The payload as it was published: JSON, unless its producer made a mistake.
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Attempt")
            .field("context", &self.context)
            .field("payload_bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// The rest of an attempt, seen from a [`Middleware`]: the middleware inside it, and then the handler.
pub struct Next {
    middleware: std::vec::IntoIter<Arc<dyn Middleware>>,
    handler: Arc<Handling>,
}

impl Next {
    /// Runs the rest, and returns how it ended. A middleware that does not call this decides the outcome
    /// without running the handler.
    ///
    /// A payload that cannot be decoded makes this [`Outcome::Dead`]. The task then becomes a dead letter
    /// (`undecodable`), whatever the middleware makes of that.
    pub async fn run(mut self, attempt: Attempt) -> Outcome {
        let running = match self.middleware.next() {
            Some(middleware) => middleware.call(attempt, self),
            None => match self.handler.start(attempt) {
                Ok(running) => running,
                Err(outcome) => return outcome,
            },
        };
        running.await
    }
}

impl fmt::Debug for Next {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Next")
            .field("middleware", &self.middleware.len())
            .finish_non_exhaustive()
    }
}

/// The handler at the end of the middleware, and whether it could decode the payload.
pub(crate) struct Handling {
    handler: ErasedHandler,
    undecodable: OnceLock<serde_json::Error>,
}

impl Handling {
    fn start(&self, attempt: Attempt) -> Result<OutcomeFuture, Outcome> {
        let Attempt {
            context, payload, ..
        } = attempt;
        let task = context.task();
        (self.handler)(&payload, context).map_err(|error| {
            let text = format!("the payload is not what task `{task}` reads ({error})");
            // Already set only where a middleware has saved an attempt for the `Next` of another.
            let _ = self.undecodable.set(error);
            Outcome::Dead(TaskError::permanent(text))
        })
    }

    /// Why the payload could not be decoded, if that was tried and failed.
    pub(crate) fn undecodable(&self) -> Option<&serde_json::Error> {
        self.undecodable.get()
    }
}

/// The middleware that an app was given, by what it is for.
#[derive(Clone, Default)]
pub(crate) struct AddedMiddleware {
    app: Vec<Arc<dyn Middleware>>,
    groups: Vec<(String, Arc<dyn Middleware>)>,
    tasks: Vec<(String, Arc<dyn Middleware>)>,
}

impl AddedMiddleware {
    pub(crate) fn add(&mut self, middleware: impl Middleware) {
        self.app.push(Arc::new(middleware));
    }

    pub(crate) fn add_to_group(&mut self, group: String, middleware: impl Middleware) {
        self.groups.push((group, Arc::new(middleware)));
    }

    pub(crate) fn add_to_task(&mut self, task: String, middleware: impl Middleware) {
        self.tasks.push((task, Arc::new(middleware)));
    }

    /// Finds the groups in the map, and the tasks among `tasks`.
    ///
    /// # Errors
    /// [`WorkerError::MiddlewareWithoutTarget`], with the name that was probably meant.
    pub(crate) fn resolve(
        self,
        topology: Option<&Topology>,
        tasks: &[&str],
    ) -> Result<MiddlewareChains, Error> {
        let mut chains = MiddlewareChains {
            app: self.app,
            ..MiddlewareChains::default()
        };
        let groups = topology.map(Topology::groups).unwrap_or_default();
        for (name, middleware) in self.groups {
            let Some(group) = groups.iter().find(|group| group.name == name) else {
                let names = groups.iter().map(|group| group.name.as_str());
                return Err(without_target("group", &name, names));
            };
            // A tier is in exactly one group, and a message tells its tier.
            for tier in &group.tiers {
                let chain = chains.tiers.entry(tier.clone()).or_default();
                chain.push(middleware.clone());
            }
        }
        for (name, middleware) in self.tasks {
            if !tasks.contains(&name.as_str()) {
                return Err(without_target("task", &name, tasks.iter().copied()));
            }
            chains.tasks.entry(name).or_default().push(middleware);
        }
        Ok(chains)
    }
}

impl fmt::Debug for AddedMiddleware {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.app.len() + self.groups.len() + self.tasks.len();
        formatter
            .debug_struct("AddedMiddleware")
            .field("count", &count)
            .finish()
    }
}

fn without_target<'a>(
    kind: &'static str,
    name: &str,
    known: impl Iterator<Item = &'a str>,
) -> Error {
    Error::Worker(WorkerError::MiddlewareWithoutTarget {
        target: format!("{kind} {name:?}").into(),
        near: near_miss(name, known).map(Into::into),
    })
}

/// Middleware by the tier that a message came from and by its task, each list from the outermost on.
#[derive(Default)]
pub(crate) struct MiddlewareChains {
    app: Vec<Arc<dyn Middleware>>,
    tiers: HashMap<String, Vec<Arc<dyn Middleware>>>,
    tasks: HashMap<String, Vec<Arc<dyn Middleware>>>,
}

impl MiddlewareChains {
    /// Whether a task of this tier has middleware. Where there is none at all, this costs next to nothing.
    pub(crate) fn has_any(&self, tier: &str, task: &str) -> bool {
        !self.app.is_empty() || self.tiers.contains_key(tier) || self.tasks.contains_key(task)
    }

    /// Starts an attempt with its middleware around the handler. The second value tells, after the
    /// attempt, whether the payload could be decoded.
    pub(crate) fn start(
        &self,
        registration: &Registration,
        context: Context,
        payload: Vec<u8>,
    ) -> (OutcomeFuture, Arc<Handling>) {
        let of_tier = self.tiers.get(context.tier()).into_iter().flatten();
        let of_task = self.tasks.get(registration.name()).into_iter().flatten();
        let chain = self.app.iter().chain(of_tier).chain(of_task);
        let handler = Arc::new(Handling {
            handler: registration.handler(),
            undecodable: OnceLock::new(),
        });
        let next = Next {
            middleware: chain.cloned().collect::<Vec<_>>().into_iter(),
            handler: handler.clone(),
        };
        let attempt = Attempt {
            context,
            payload,
            #[cfg(feature = "tower")]
            next: None,
        };
        (Box::pin(next.run(attempt)), handler)
    }
}
