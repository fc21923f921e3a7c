use std::collections::HashMap;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::{Context, Handler, OutcomeFuture, Task, TaskOptions};
use crate::error::Error;
use crate::error::WorkerError;

/// The handlers of a program, by the name of their task.
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use tierline::{Registry, Task, TaskError};
///
/// #[derive(Serialize, Deserialize)]
/// struct Greet {
///     name: String,
/// }
///
/// impl Task for Greet {
///     const NAME: &'static str = "greet";
/// }
///
/// async fn greet(greet: Greet) -> Result<(), TaskError> {
///     println!("Good evening, {}", greet.name);
///     Ok(())
/// }
///
/// let mut registry = Registry::new();
/// registry.register::<Greet, _>(greet)?;
/// assert!(registry.get("greet").is_some());
/// # Ok::<(), tierline::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Registry {
    registrations: HashMap<&'static str, Registration>,
}

impl Registry {
    /// A registry without handlers.
    pub fn new() -> Self {
        Self::default()
    }

    /// A registry with every `#[task]` handler of every crate linked into this program.
    ///
    /// The [module's documentation](super#how-handlers-are-found) explains which crates are linked.
    ///
    /// # Errors
    ///
    /// As [`register`](Self::register).
    pub fn collected() -> Result<Self, Error> {
        let mut registry = Self::new();
        for registration in Registration::collected() {
            registry.insert(registration)?;
        }
        Ok(registry)
    }

    /// Adds the handler of the task `T`, with the default options.
    ///
    /// # Errors
    ///
    /// [`WorkerError::DuplicateHandler`] if the task already has a handler.
    #[track_caller]
    pub fn register<T: Task, Marker>(
        &mut self,
        handler: impl Handler<T, Marker>,
    ) -> Result<&mut Self, Error> {
        self.register_with(handler, TaskOptions::new())
    }

    /// Adds the handler of the task `T`, with these options.
    ///
    /// # Errors
    ///
    /// [`WorkerError::DuplicateHandler`] if the task already has a handler,
    /// [`WorkerError::SoftTimeoutTooLong`] if the soft limit is not below the hard one, and
    /// [`Error::InvalidDuration`] if one of the options is not a duration.
    #[track_caller]
    pub fn register_with<T: Task, Marker>(
        &mut self,
        handler: impl Handler<T, Marker>,
        options: TaskOptions,
    ) -> Result<&mut Self, Error> {
        self.insert(Registration::new(
            move |payload, context| handler.call(payload, context),
            options,
        ))
    }

    /// The handler of the task of this name.
    pub fn get(&self, task: &str) -> Option<&Registration> {
        self.registrations.get(task)
    }

    /// Every handler, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &Registration> {
        self.registrations.values()
    }

    fn insert(&mut self, registration: Registration) -> Result<&mut Self, Error> {
        registration.options.check()?;
        let TaskOptions { timeout, .. } = registration.options;
        let soft_timeout = registration.options.effective_soft_timeout();
        if soft_timeout >= timeout {
            return Err(Error::Worker(WorkerError::SoftTimeoutTooLong {
                task: registration.name,
                soft_timeout,
                timeout,
            }));
        }
        if let Some(earlier) = self.registrations.get(registration.name) {
            return Err(Error::Worker(WorkerError::DuplicateHandler {
                task: registration.name,
                first: earlier.place,
                second: registration.place,
            }));
        }
        self.registrations.insert(registration.name, registration);
        Ok(self)
    }
}

/// A handler in the registry, with its types erased.
pub struct Registration {
    name: &'static str,
    options: TaskOptions,
    place: &'static Location<'static>,
    handler: ErasedHandler,
}

pub(super) type ErasedHandler =
    Arc<dyn Fn(&[u8], Context) -> Result<OutcomeFuture, serde_json::Error> + Send + Sync>;

impl Registration {
    #[track_caller]
    fn new<T: Task>(
        call: impl Fn(T, Context) -> OutcomeFuture + Send + Sync + 'static,
        options: TaskOptions,
    ) -> Self {
        Self {
            name: T::NAME,
            options,
            place: Location::caller(),
            handler: Arc::new(move |payload, context| {
                Ok(call(serde_json::from_slice(payload)?, context))
            }),
        }
    }

    pub(super) fn collected() -> impl Iterator<Item = Self> {
        inventory::iter::<Collected>
            .into_iter()
            .map(|Collected(registration)| registration())
    }

    /// The task's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The retries and limits of the task.
    pub fn options(&self) -> &TaskOptions {
        &self.options
    }

    /// The file and line of the handler, or of its registration by hand.
    pub fn place(&self) -> &'static Location<'static> {
        self.place
    }

    /// Decodes the payload and starts the handler, without limits: the executor applies those.
    ///
    /// # Errors
    ///
    /// If the task's type cannot deserialize the payload.
    pub fn call(
        &self,
        payload: &[u8],
        context: Context,
    ) -> Result<OutcomeFuture, serde_json::Error> {
        (self.handler)(payload, context)
    }

    pub(super) fn handler(&self) -> ErasedHandler {
        self.handler.clone()
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Registration")
            .field("name", &self.name)
            .field("options", &self.options)
            .field("place", &format_args!("{}", self.place))
            .finish_non_exhaustive()
    }
}

/// A handler that `#[task]` submits; the registration is created on demand.
#[derive(Debug)]
pub struct Collected(pub fn() -> Registration);

/// The registration that `#[task]` submits.
#[track_caller]
pub fn registration<T: Task>(
    call: fn(T, Context) -> OutcomeFuture,
    options: TaskOptions,
) -> Registration {
    Registration::new(call, options)
}

inventory::collect!(Collected);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Greet;

    impl Task for Greet {
        const NAME: &'static str = "greet";
    }

    async fn greet(_: Greet) {}

    #[test]
    fn two_handlers_of_one_task_are_refused_and_both_places_named() {
        let mut registry = Registry::new();
        registry.register(greet).unwrap();
        let first = line!() - 1;
        let error = registry.register(greet).unwrap_err().to_string();
        let second = line!() - 1;
        assert!(error.contains("`greet`"), "{error}");
        assert!(error.contains(&format!("registry.rs:{first}")), "{error}");
        assert!(error.contains(&format!("registry.rs:{second}")), "{error}");
    }

    #[test]
    fn a_soft_limit_above_the_hard_one_is_refused() {
        let options = TaskOptions::new()
            .soft_timeout(Duration::from_secs(30))
            .timeout(Duration::from_secs(20));
        let error = Registry::new()
            .register_with(greet, options)
            .unwrap_err()
            .to_string();
        assert!(error.contains("30s") && error.contains("20s"), "{error}");
    }
}
