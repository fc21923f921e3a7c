//! The guide: a page for each question. Every block of Rust in it, and so every map, is a test of this crate.
//!
//! | page | the question |
//! |---|---|
//! | [your first task](your_first_task) | How do I begin? |
//! | [choosing tiers](choosing_tiers) | How urgent is this task? |
//! | [tiers in Postgres](tiers_in_postgres) | When does a tier belong in Postgres? |
//! | [the outbox](the_outbox) | How do I publish with my own rows, or not at all? |
//! | [relay] | Workers do not have the publishers' database. Who takes its rows? |
//! | [aging and escalation](aging_and_escalation) | A task has waited for too long. What now? |
//! | [at run time](at_run_time) | It is 2 a.m. What can I change without a deploy? |
//! | [metrics] | What happens, by tier and task, and do my tiers meet their SLO? |
//! | [watching tiers](watching_tiers) | What waits, for how long, and is the SLO met? |
//! | [prefetch and concurrency](prefetch_and_concurrency) | How many run at once, and how many are prefetched? |
//! | [idempotent handlers](idempotent_handlers) | What if a task runs twice? |
//! | [effectively once](effectively_once) | How do I write to Postgres once, however often a task runs? |
//! | [unique tasks](unique_tasks) | How do I keep the same work from being queued twice? |
//! | [long tasks across deploys](long_tasks_across_deploys) | What if a deploy comes while it runs? |
//! | [middleware] | What do many handlers have in common? |
//! | [handlers that hang](handlers_that_hang) | What if a handler never yields? |
//! | [deploying a new task](deploying_a_new_task) | In which order do I roll out? |
//! | [changing a topology](changing_a_topology) | What can I change, and how? |
//! | [operating dead letters](operating_dead_letters) | Tasks have failed. What now? |
//! | [crashes and poison](crashes_and_poison) | A task kills its worker. What now? |
//! | [alerts] | An alert fired. What does it mean, and what now? |
//! | [running on a cluster](running_on_a_cluster) | What if a node dies? |
//! | [coming from Celery](coming_from_celery) | What is this called here? |
//! | [coming from SQL queues](coming_from_sql_queues) | Which line does what my table of jobs does? |
//! | [guarantees] | What is guaranteed, and what is not? |
//! | [how it compares](how_it_compares) | What do other frameworks do? |

#[doc = include_str!("your_first_task.md")]
pub mod your_first_task {}

#[doc = include_str!("choosing_tiers.md")]
pub mod choosing_tiers {}

#[cfg(feature = "postgres")]
#[doc = include_str!("tiers_in_postgres.md")]
pub mod tiers_in_postgres {}

#[cfg(feature = "postgres")]
#[doc = include_str!("the_outbox.md")]
pub mod the_outbox {}

#[cfg(feature = "postgres")]
#[doc = include_str!("relay.md")]
pub mod relay {}

#[cfg(feature = "postgres")]
#[doc = include_str!("aging_and_escalation.md")]
pub mod aging_and_escalation {}

#[cfg(feature = "postgres")]
#[doc = include_str!("at_run_time.md")]
pub mod at_run_time {}

#[cfg(all(feature = "admin", feature = "prometheus"))]
#[doc = include_str!("metrics.md")]
pub mod metrics {}

#[cfg(feature = "postgres")]
#[doc = include_str!("watching_tiers.md")]
pub mod watching_tiers {}

#[doc = include_str!("prefetch_and_concurrency.md")]
pub mod prefetch_and_concurrency {}

#[doc = include_str!("idempotent_handlers.md")]
pub mod idempotent_handlers {}

#[cfg(feature = "postgres")]
#[doc = include_str!("effectively_once.md")]
pub mod effectively_once {}

#[cfg(feature = "postgres")]
#[doc = include_str!("unique_tasks.md")]
pub mod unique_tasks {}

#[doc = include_str!("long_tasks_across_deploys.md")]
pub mod long_tasks_across_deploys {}

#[doc = include_str!("middleware.md")]
pub mod middleware {}

#[doc = include_str!("handlers_that_hang.md")]
pub mod handlers_that_hang {}

#[doc = include_str!("deploying_a_new_task.md")]
pub mod deploying_a_new_task {}

#[doc = include_str!("changing_a_topology.md")]
pub mod changing_a_topology {}

#[doc = include_str!("operating_dead_letters.md")]
pub mod operating_dead_letters {}

#[doc = include_str!("crashes_and_poison.md")]
pub mod crashes_and_poison {}

#[cfg(feature = "postgres")]
#[doc = include_str!("alerts.md")]
pub mod alerts {}

#[doc = include_str!("running_on_a_cluster.md")]
pub mod running_on_a_cluster {}

#[doc = include_str!("coming_from_celery.md")]
pub mod coming_from_celery {}

#[cfg(feature = "postgres")]
#[doc = include_str!("coming_from_sql_queues.md")]
pub mod coming_from_sql_queues {}

#[doc = include_str!("guarantees.md")]
pub mod guarantees {}

#[doc = include_str!("how_it_compares.md")]
pub mod how_it_compares {}
