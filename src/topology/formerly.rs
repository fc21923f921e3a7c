//! `formerly` of a tier: where its messages waited before it moved.

use toml::de::DeValue;

use super::reader::{Reader, found};
use super::tier::{GENERATIONS, Home, POSTGRES, QueueType};

/// Where the messages of a tier waited before it moved: the key `formerly`. Workers take from there too, until the
/// move is over and the key is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Formerly {
    /// In a queue of the broker.
    Queue {
        /// Its type.
        queue: QueueType,
        /// Its generation; 1 unless the file says otherwise.
        generation: u32,
    },
    /// As rows in Postgres.
    Postgres,
}

impl Formerly {
    /// The generation of the queue that the tier had; `None` if it was in Postgres.
    pub fn generation(self) -> Option<u32> {
        match self {
            Formerly::Queue { generation, .. } => Some(generation),
            Formerly::Postgres => None,
        }
    }
}

/// Reads `formerly`, and refuses one that is no move: `home` and `generation` are what the tier is now.
pub(super) fn read(table: &mut Reader<'_>, home: Home, generation: u32) -> Option<Formerly> {
    let formerly = match table.value("formerly")?.get_ref() {
        DeValue::Table(_) => read_table(table)?,
        DeValue::String(_) => match table.choice("formerly", &CHOICES)? {
            Some(queue) => Formerly::Queue {
                queue,
                generation: 1,
            },
            None => Formerly::Postgres,
        },
        value => {
            let message = format!(
                "formerly in {} must be \"classic\", \"quorum\", \"postgres\" or a table, found {}",
                table.what(),
                found(value)
            );
            let help =
                "write formerly = \"quorum\", or formerly = { queue = \"quorum\", generation = 2 }";
            table.reject("formerly", message, Some(help));
            return None;
        }
    };
    let queue = table.value("queue").and_then(|it| it.get_ref().as_str());
    // A wrong queue type is reported once.
    if CHOICES.iter().any(|(word, _)| Some(*word) == queue) {
        check(table, formerly, home, generation);
    }
    Some(formerly)
}

/// The words of `queue`, here and in the tier itself.
pub(super) const CHOICES: [(&str, Option<QueueType>); 3] = [
    ("classic", Some(QueueType::Classic)),
    ("quorum", Some(QueueType::Quorum)),
    (POSTGRES, None),
];

fn read_table(tier: &mut Reader<'_>) -> Option<Formerly> {
    let mut table = tier.table("formerly")?;
    let queue = table.choice("queue", &CHOICES);
    let generation = table.integer("generation", GENERATIONS);
    if queue == Some(None) && table.has("generation") {
        let message = format!(
            "generation in {} is for queues on the broker, and this tier was in Postgres",
            table.what()
        );
        table.reject("generation", message, Some("remove it"));
    }
    let how = "write queue = \"classic\", \"quorum\" or \"postgres\", which the tier was before";
    table.finish(&[("queue", how)]);
    Some(match queue? {
        Some(queue) => Formerly::Queue {
            queue,
            generation: generation.unwrap_or(1),
        },
        None => Formerly::Postgres,
    })
}

fn check(table: &Reader<'_>, formerly: Formerly, home: Home, now: u32) {
    let what = table.what();
    let (message, help) = match (formerly, home.queue_type()) {
        (Formerly::Postgres, None) => (
            format!("formerly in {what} is what the tier is now: rows in Postgres"),
            "remove it, or name the queue that the tier had on the broker".to_owned(),
        ),
        (Formerly::Queue { queue, generation }, Some(today))
            if generation == now && queue == today =>
        {
            let message = format!(
                "formerly in {what} is what the tier is now: generation {now} of a {} queue",
                queue.as_str()
            );
            let help = format!(
                "remove it; or, if arguments of the queue change, set generation = {}",
                next(now)
            );
            (message, help)
        }
        (Formerly::Queue { queue, generation }, Some(today)) if generation == now => {
            let message = format!(
                "formerly in {what} makes a {} queue a {} queue of the same generation, and the type of a queue \
                 cannot change",
                queue.as_str(),
                today.as_str()
            );
            (
                message,
                format!("set generation = {} in the tier", next(now)),
            )
        }
        _ => return,
    };
    table.reject("formerly", message, Some(&help));
}

fn next(generation: u32) -> u32 {
    match generation < *GENERATIONS.end() {
        true => generation + 1,
        false => 1,
    }
}
