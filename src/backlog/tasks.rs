//! Keeps a copy of the map's tasks and tiers in the database, for producers that publish with `tierline.publish`.

use super::add_backlogs;
use crate::Error;
use crate::postgres::{Database, PgConnection, STATEMENT_LIMIT};
use crate::topology::{MappedTask, Topology};

/// Writes what the map says of its tasks, and gives its tiers their numbers. What is there already is not written again,
/// and tasks that only another version of the map has stay.
pub(crate) async fn store_tasks(database: &Database, topology: &Topology) -> Result<(), Error> {
    let storing = async {
        let mut transaction = database.pool().begin().await?;
        let tiers: Vec<&str> = topology.tiers().iter().map(|it| &*it.name).collect();
        add_backlogs(&mut transaction, topology.app(), &tiers).await?;
        store_tiers(&mut transaction, topology.app(), &tiers).await?;
        let mut tasks: Vec<&MappedTask> = topology.tasks().iter().collect();
        // In one order in all processes, so that none waits for another in a circle.
        tasks.sort_by_key(|task| &task.name);
        let highest = |task: &MappedTask| {
            let tier = topology.tier(&task.tier);
            tier.and_then(|tier| tier.home.max_priority())
                .map(i16::from)
        };
        let max_size = i64::try_from(topology.broker().max_message_size).unwrap_or(i64::MAX);
        sqlx::query(
            "INSERT INTO tierline.tasks AS old (app, task, tier, priority, max_priority, max_size) \
             SELECT $1, new.task, new.tier, new.priority, new.max_priority, $6 \
             FROM unnest($2::text[], $3::text[], $4::smallint[], $5::smallint[]) AS new (task, tier, priority, max_priority) \
             WHERE NOT EXISTS (SELECT FROM tierline.tasks AS old WHERE old.app = $1 AND old.task = new.task \
                 AND (old.tier, old.priority, old.max_priority, old.max_size) \
                     IS NOT DISTINCT FROM (new.tier, new.priority, new.max_priority, $6)) \
             ON CONFLICT (app, task) DO UPDATE SET tier = excluded.tier, priority = excluded.priority, \
                 max_priority = excluded.max_priority, max_size = excluded.max_size",
        )
        .bind(topology.app())
        .bind(column(&tasks, |task| task.name.as_str()))
        .bind(column(&tasks, |task| task.tier.as_str()))
        .bind(column(&tasks, |task| i16::from(task.priority)))
        .bind(column(&tasks, highest))
        .bind(max_size)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await
    };
    let tried = "store the tasks of the map";
    database.within(STATEMENT_LIMIT, tried, storing).await
}

/// Notes which tiers the map has. One that is not in it has no workers, so no override leads there.
async fn store_tiers(
    connection: &mut PgConnection<'_>,
    app: &str,
    tiers: &[&str],
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "WITH changed AS MATERIALIZED ( \
            SELECT id FROM tierline.backlogs WHERE app = $1 AND is_mapped <> (tier = ANY($2)) ORDER BY id FOR UPDATE \
         ) UPDATE tierline.backlogs SET is_mapped = NOT is_mapped \
         WHERE id IN (SELECT id FROM changed) AND is_mapped <> (tier = ANY($2))",
    )
    .bind(app)
    .bind(tiers)
    .execute(connection)
    .await
    .map(drop)
}

/// Removes the tasks that the map does not have.
pub(crate) async fn remove_other_tasks(
    database: &Database,
    topology: &Topology,
) -> Result<(), Error> {
    let names: Vec<&str> = topology.tasks().iter().map(|it| &*it.name).collect();
    let removing = sqlx::query("DELETE FROM tierline.tasks WHERE app = $1 AND NOT task = ANY($2)")
        .bind(topology.app())
        .bind(names)
        .execute(database.pool());
    let tried = "remove tasks that the map does not have";
    let removed = database.within(STATEMENT_LIMIT, tried, removing).await;
    removed.map(drop)
}

fn column<'t, T>(tasks: &[&'t MappedTask], of: impl Fn(&'t MappedTask) -> T) -> Vec<T> {
    tasks.iter().map(|task| of(task)).collect()
}
