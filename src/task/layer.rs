use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context as PollContext, Poll};

use tower_layer::Layer;
use tower_service::Service;

use super::{Attempt, IntoOutcome, Middleware, Next, Outcome, OutcomeFuture, TaskError};

/// A `tower` layer as a [`Middleware`]; made by [`layer`].
#[derive(Clone)]
pub struct Layered<S>(S);

/// Makes a [`Middleware`] of a `tower` layer (feature `tower`).
///
/// The layer is applied once; each attempt runs on a clone of the resulting service, so that clones that
/// share a limit share it between attempts.
///
/// ```
/// use std::time::Duration;
/// use tierline::task::layer;
/// # use tierline::{Tierline, Topology};
/// use tower::limit::ConcurrencyLimitLayer;
/// use tower::timeout::TimeoutLayer;
///
/// # fn example(topology: Topology) {
/// let builder = Tierline::builder(topology)
///     .middleware(layer(TimeoutLayer::new(Duration::from_secs(30))))
///     .task_middleware("report.export", layer(ConcurrencyLimitLayer::new(2)));
/// # }
/// ```
///
/// An error of the layer fails the attempt: it is retried as the task's policy says. A middleware outside the layer can
/// replace that outcome; [`TaskError::as_error`] has the layer's error. A failure of the handler is no error to the
/// layer but a response, an [`Outcome`].
///
/// **A limit holds the slots of those that wait.** An attempt that waits for a service to become ready keeps its
/// slot in its group, and its time limits run. If tasks of several tiers share one limit, a task of a lower tier
/// can hold up a task of a higher one: limit single tasks or the lowest tier, and leave urgent groups alone. Such
/// a limit also counts the attempts of one process only.
pub fn layer<L: Layer<NextService>>(layer: L) -> Layered<L::Service> {
    Layered(layer.layer(NextService(())))
}

impl<S> Middleware for Layered<S>
where
    S: Service<Attempt> + Clone + Send + Sync + 'static,
    S::Response: IntoOutcome,
    S::Error: Into<TaskError>,
    S::Future: Send + 'static,
{
    fn call(&self, mut attempt: Attempt, next: Next) -> OutcomeFuture {
        attempt.next = Some(next);
        let mut service = self.0.clone();
        Box::pin(async move {
            if let Err(error) = poll_fn(|cx| service.poll_ready(cx)).await {
                return Err::<Outcome, S::Error>(error).into_outcome();
            }
            let running = service.call(attempt);
            // It may hold what others wait for, and is not needed while the attempt runs.
            drop(service);
            running.await.into_outcome()
        })
    }
}

impl<S> fmt::Debug for Layered<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Layered").finish_non_exhaustive()
    }
}

/// The service inside a `tower` layer: it runs the rest of the attempt.
#[derive(Debug, Clone)]
pub struct NextService(());

impl Service<Attempt> for NextService {
    type Response = Outcome;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Outcome, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut PollContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut attempt: Attempt) -> Self::Future {
        let next = attempt.next.take();
        Box::pin(async move {
            Ok(match next {
                Some(next) => next.run(attempt).await,
                None => Outcome::retry("a `tower` layer called its service outside `task::layer`"),
            })
        })
    }
}
