//! No type of the public interface shows a password or a token.
//!
//! Two nets. The first builds every public type that can reach a credential, with a password in its
//! URLs, and looks at what `{:?}` prints. The second reads the source: it finds which public types those
//! are, so that a new one cannot be forgotten here, and which fields would hold a credential as plain text.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quote::ToTokens;
use syn::{Fields, Item, Visibility};
use tierline::admin::Token;
use tierline::amqp::{Address, Connection, Management};
use tierline::dead::{DeadLetters, Filter};
use tierline::moving::Mover;
use tierline::testing::Tester;
use tierline::{Database, Error, Registry, Tierline, Topology};
use tierline_testbed::vhost;

const MAP: &str = r#"
    app = "shop"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 1
    [tasks]
    "order.ship" = "normal"
"#;

/// With an @ in it, which a URL has as %40.
const PASSWORD: &str = "hush@hush";
const ENCODED: &str = "hush%40hush";
const TOKEN: &str = "hush-0123456789abcdef";

/// What `{:?}` and `{:#?}` print of a value, by the name of its type.
#[derive(Default)]
struct Shown(BTreeMap<&'static str, String>);

impl Shown {
    fn add(&mut self, name: &'static str, value: &impl Debug) {
        self.0.insert(name, format!("{value:?}\n{value:#?}"));
    }
}

#[tokio::test]
async fn no_public_type_shows_a_credential() {
    let mut vhost = vhost().await;
    vhost.add_user(PASSWORD).await.unwrap();
    let (_, host) = vhost.amqp_url().rsplit_once('@').unwrap();
    let broker = format!("amqp://{}:{ENCODED}@{host}", vhost.name());
    // It need not be there: it is connected to when it is first used.
    let postgres = format!("postgres://ada:{ENCODED}@127.0.0.1:1/hotel?password={ENCODED}");
    let management = format!("http://ada:{ENCODED}@127.0.0.1:15672");
    let topology = Topology::parse(MAP).unwrap();

    let mut shown = Shown::default();
    let builder = Tierline::builder(topology.clone())
        .amqp(&broker)
        .postgres(&postgres);
    shown.add("Builder", &builder);
    let app = builder.connect().await.unwrap();
    shown.add("Tierline", &app);
    shown.add("Worker", &app.work(["all"]));
    shown.add("Collector", &app.collector().unwrap());
    shown.add("Scheduler", &app.scheduler().unwrap());
    shown.add("Schedules", &app.schedules().unwrap());
    let backlog = app.backlog().unwrap();
    shown.add("Backlog", &backlog);
    shown.add("Escalation", &backlog.escalate(&"one".into(), "normal"));
    shown.add("Relay", &app.relay().unwrap());
    let control = app.control().unwrap();
    shown.add("Control", &control);
    shown.add("Change", &control.pause_tier("normal"));
    shown.add("LimitChange", &control.limit_tier("normal"));
    shown.add("Overriding", &control.override_task("order.ship"));
    let rollups = app.rollups().unwrap();
    shown.add("Rollups", &rollups);
    shown.add("RollupQuery", &rollups.last(Duration::from_secs(60)));
    let tester = Tester::builder().registry(Registry::new());
    let tester = tester.database(Database::new(&postgres).unwrap());
    shown.add("TesterBuilder", &tester);
    shown.add("Tester", &tester.build());
    let letters = app.dead_letters().unwrap();
    shown.add("DeadLetters", &letters);
    shown.add("Database", &Database::new(&postgres).unwrap());
    shown.add("Address", &broker.parse::<Address>().unwrap());
    let connection = Connection::open(&broker, "test").await.unwrap();
    shown.add("Connection", &connection);
    let management = Management::new(&management).unwrap();
    let mover = Mover::new(&topology)
        .broker(&connection)
        .management(&management);
    shown.add("Mover", &mover);
    shown.add("Management", &management);
    shown.add("Token", &Token::new(TOKEN).unwrap());
    shown.add(
        "PublishBuilder",
        &app.publish_named("order.ship", &7.into()),
    );
    let Err(missing) =
        DeadLetters::without_broker(topology.clone(), Database::new(&postgres).unwrap())
            .count(&Filter::default())
            .await
    else {
        panic!("there is a database where none should be")
    };
    shown.add("Error", &missing);

    for (name, shown) in &shown.0 {
        let shown = shown.to_lowercase();
        assert!(!shown.contains("hush"), "{name}: {shown}");
        // As the header of the management API has it.
        assert!(!shown.contains("basic "), "{name}: {shown}");
    }
    let checked: BTreeSet<&str> = shown.0.keys().chain(&NOT_TO_BE_SHOWN).copied().collect();
    let reached = public_types_with_credentials();
    let forgotten: Vec<_> = reached
        .iter()
        .filter(|name| !checked.contains(name.as_str()))
        .collect();
    assert!(
        forgotten.is_empty(),
        "{forgotten:?} can reach a credential, and are not looked at here"
    );
}

/// `BulkRedrive` has no `Debug`.
const NOT_TO_BE_SHOWN: [&str; 1] = ["BulkRedrive"];

#[tokio::test]
async fn no_error_shows_a_credential_of_the_url_that_it_is_about() {
    let builder = |url: String| Tierline::builder(Topology::parse(MAP).unwrap()).amqp(url);
    let nobody = format!("ada:{ENCODED}@127.0.0.1:1");
    let mut errors: Vec<Error> = Vec::new();
    for url in [
        format!("amqp://{nobody}/hotel"),
        format!("amqp://ada:{PASSWORD}/@127.0.0.1:1"),
        format!("http://{nobody}"),
        format!("amqp://{nobody}:port"),
        format!("amqp://127.0.0.1?auth_mechanism={ENCODED}"),
        PASSWORD.to_owned(),
    ] {
        errors.push(builder(url).connect().await.unwrap_err());
    }
    for url in [
        format!("postgres://ada:12/{PASSWORD}@127.0.0.1/hotel"),
        format!("postgres://{nobody}/hotel?sslmode={ENCODED}"),
        PASSWORD.to_owned(),
    ] {
        errors.push(Database::new(&url).unwrap_err());
        let app = builder(format!("amqp://{nobody}")).postgres(url);
        errors.push(app.connect().await.unwrap_err());
    }
    for url in [
        format!("http://ada:12/{PASSWORD}@host"),
        format!("http://ada:{ENCODED}@host:port"),
        PASSWORD.to_owned(),
    ] {
        errors.push(Management::new(&url).unwrap_err());
    }
    errors.push(Token::new("hush").unwrap_err());
    for error in errors {
        let mut shown = format!("{error} {error:?} {error:#?}");
        let mut source = error.source();
        while let Some(cause) = source {
            shown += &format!("{cause} {cause:?}");
            source = cause.source();
        }
        assert!(!shown.contains("hush"), "{shown}");
    }
}

/// A struct, or a variant of an enum: its fields by name, and their types as they are written.
#[derive(Clone)]
struct Shape {
    file: PathBuf,
    name: String,
    visibility: String,
    fields: Vec<(String, String)>,
}

/// Every struct and enum in a folder.
fn shapes(folder: &str) -> Vec<Shape> {
    let mut shapes = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let file = syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap();
                let items = file.items.iter();
                items.for_each(|item| read(item, &path, &mut shapes));
            }
        }
    }
    assert!(shapes.len() > 20, "only {} were found", shapes.len());
    shapes
}

fn read(item: &Item, file: &Path, shapes: &mut Vec<Shape>) {
    let mut add = |name: &syn::Ident, visibility: &Visibility, fields: &Fields| {
        let fields = fields.iter().map(|field| {
            let name = field.ident.as_ref();
            let name = name.map_or(String::new(), ToString::to_string);
            (name, field.ty.to_token_stream().to_string())
        });
        shapes.push(Shape {
            file: file.to_owned(),
            name: name.to_string(),
            visibility: visibility.to_token_stream().to_string(),
            fields: fields.collect(),
        });
    };
    match item {
        Item::Struct(item) => add(&item.ident, &item.vis, &item.fields),
        Item::Enum(item) => {
            for variant in &item.variants {
                add(&item.ident, &item.vis, &variant.fields);
            }
        }
        Item::Mod(module) => {
            for item in module.content.iter().flat_map(|(_, items)| items) {
                read(item, file, shapes);
            }
        }
        _ => {}
    }
}

/// The types that hold a credential themselves: ours, and those of lapin and sqlx.
const HOLDERS: [&str; 5] = ["Secret", "Token", "AMQPUri", "PgPool", "PgConnectOptions"];

/// The public types from which fields lead to a credential, over however many other types.
fn public_types_with_credentials() -> BTreeSet<String> {
    let shapes = shapes("src");
    let mut reached: BTreeSet<(&Path, &str)> = BTreeSet::new();
    loop {
        let before = reached.len();
        for shape in &shapes {
            let mut types = shape.fields.iter().flat_map(|(_, kind)| words(kind));
            let leads_there = |kind: &str| {
                let is_reached = |met: &Shape| reached.contains(&(&*met.file, &*met.name));
                HOLDERS.contains(&kind) || named(&shapes, kind, &shape.file).any(is_reached)
            };
            if types.any(leads_there) {
                reached.insert((&shape.file, &shape.name));
            }
        }
        if reached.len() == before {
            break;
        }
    }
    let public = shapes.iter().filter(|shape| shape.visibility == "pub");
    let public = public.filter(|shape| reached.contains(&(&*shape.file, &*shape.name)));
    public.map(|shape| shape.name.clone()).collect()
}

/// The types that a name may stand for in a file: those of that file, else of its folder, else of all
/// others that can be seen from there.
fn named<'s>(shapes: &'s [Shape], name: &str, file: &Path) -> impl Iterator<Item = &'s Shape> {
    let near = |shape: &Shape| match () {
        () if shape.file == file => 0,
        () if shape.file.parent() == file.parent() => 1,
        () if ["pub", "pub (crate)"].contains(&&*shape.visibility) => 2,
        () => 3,
    };
    let candidates = || shapes.iter().filter(move |shape| shape.name == name);
    let nearest = candidates().map(near).min().unwrap_or_default().min(2);
    let found: Vec<_> = candidates()
        .filter(|shape| near(shape) == nearest)
        .collect();
    found.into_iter()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

#[test]
fn no_field_holds_a_url_or_a_password_as_plain_text() {
    const NAMES: [&str; 9] = [
        "url",
        "uri",
        "password",
        "secret",
        "token",
        "credential",
        "authorization",
        "amqp",
        "postgres",
    ];
    let is_secret = |name: &str| {
        let one = name.trim_end_matches('s');
        let is = |secret: &&str| name.ends_with(*secret) || one.ends_with(*secret);
        NAMES.iter().any(is)
    };
    let mut found = Vec::new();
    for shape in [shapes("src"), shapes("cli/src")].concat() {
        for (name, kind) in &shape.fields {
            let is_text = words(kind).any(|word| ["String", "str", "u8"].contains(&word));
            if is_secret(name) && is_text {
                found.push(format!(
                    "{}: {}.{name}: {kind}",
                    shape.file.display(),
                    shape.name
                ));
            }
        }
    }
    assert!(
        found.is_empty(),
        "hold these as a `Secret`, which `Debug` does not show: {found:#?}"
    );
}
