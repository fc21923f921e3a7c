//! From the text of a file to its checked content: the sections in their order.
//!
//! A new section is a file of its own with a `read`, one line in [`read_sections`] and one field.

use std::collections::HashMap;

use toml::de::DeTable;

use super::broker::{self, BrokerSettings};
use super::group::{self, Group};
use super::names::{self, Names};
use super::problem::InvalidTopology;
use super::reader::{At, Reader, quoted};
use super::schedule::{self, Schedule};
use super::source::Source;
use super::task::{self, MappedTask};
use super::tier::{self, Tier};
use super::{MAX_FILE_SIZE, units};

/// The content of a file without mistakes.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) app: String,
    pub(super) broker: BrokerSettings,
    pub(super) tiers: Vec<Tier>,
    pub(super) groups: Vec<Group>,
    pub(super) tasks: Vec<MappedTask>,
    /// The position of each task in `tasks`, by its name.
    pub(super) task_index: HashMap<String, usize>,
    pub(super) schedules: Vec<Schedule>,
}

pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Content, InvalidTopology> {
    let text = readable(file, bytes)?;
    let source = Source::new(file, text);
    let (root, errors) = DeTable::parse_recoverable(text);

    // The parser may misread the text after a syntax error, but not after a duplicate key.
    let (duplicates, broken): (Vec<_>, Vec<_>) = errors
        .iter()
        .partition(|error| error.message() == "duplicate key");
    for error in broken.iter().chain(&duplicates) {
        report_syntax(error, &source);
    }
    if !broken.is_empty() {
        return Err(source.refuse());
    }
    if root.get_ref().is_empty() {
        let help = "write app = \"NAME\", then [tiers.NAME], [groups.NAME] and [tasks]";
        source.report(&(0..0), "the topology is empty", Some(help));
        return Err(source.refuse());
    }
    let content = read_sections(root.get_ref(), &source);
    source.finish(content)
}

fn read_sections(root: &DeTable<'_>, source: &Source<'_>) -> Content {
    let mut root = Reader::new("the file".to_owned(), 0..0, root, source);
    let app = read_app(&mut root);
    let broker = broker::read(&mut root);
    let tiers = tier::read(&mut root, app.as_deref());
    let groups = group::read(&mut root, app.as_deref(), &tiers);
    let tasks = task::read(&mut root, &tiers);
    let schedules = schedule::read(&mut root, &tasks);
    root.finish(&[
        (
            "app",
            "write app = \"NAME\" in the first line; it begins every name on the broker",
        ),
        (
            "tiers",
            "write [tiers.NAME] and queue = \"quorum\" or \"classic\" below it",
        ),
        (
            "groups",
            "write [groups.NAME] with tiers = [\"NAME\"] and concurrency = 4, say, below it",
        ),
        (
            "tasks",
            "write [tasks] and \"TASK\" = \"TIER\" for every task below it",
        ),
    ]);
    Content {
        app: app.unwrap_or_default(),
        broker,
        tiers: tiers.into_iter().map(At::into_inner).collect(),
        groups,
        task_index: tasks
            .iter()
            .enumerate()
            .map(|(index, task)| (task.name.clone(), index))
            .collect(),
        tasks,
        schedules,
    }
}

fn read_app(root: &mut Reader<'_>) -> Option<String> {
    let app = root.text("app")?;
    let longest = Names::new(app).long_delay_out().len();
    if let Some((message, help)) = names::mistake("app", app, longest) {
        root.reject("app", message, Some(&help));
    } else if app == "amq" {
        let message = "the broker keeps names that begin with \"amq.\" for itself";
        root.reject("app", message, Some("choose another name for the app"));
    }
    Some(app.to_owned())
}

/// The bytes as text, if they are one of a bearable size.
fn readable<'f>(file: &str, bytes: &'f [u8]) -> Result<&'f str, InvalidTopology> {
    let refuse = |text, offset: usize, message: String| {
        let source = Source::new(file, text);
        source.report(&(offset..offset), message, None);
        Err(source.refuse())
    };
    if bytes.len() > MAX_FILE_SIZE {
        let limit = units::show_size(MAX_FILE_SIZE as u64);
        return refuse(
            "",
            0,
            format!("the topology is larger than {limit}; is it the right file?"),
        );
    }
    std::str::from_utf8(bytes).or_else(|error| {
        let valid = bytes.get(..error.valid_up_to()).unwrap_or_default();
        let text = std::str::from_utf8(valid).unwrap_or_default();
        refuse(
            text,
            text.len(),
            "from here on the file is not UTF-8 text; is it the right file?".to_owned(),
        )
    })
}

fn report_syntax(error: &toml::de::Error, source: &Source<'_>) {
    let span = error.span().unwrap_or_default();
    match error.message() {
        "duplicate key" => {
            let written = source.text().get(span.clone()).unwrap_or_default();
            let key = written.trim_matches(['"', '\'']);
            let help = "remove one of them, or rename it";
            source.report(
                &span,
                format!("the key {} is given twice", quoted(key)),
                Some(help),
            );
        }
        message => source.report(&span, format!("not valid TOML: {message}"), None),
    }
}
