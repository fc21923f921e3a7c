//! The command-line arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use tierline::task::IntoDuration;
use tierline::topology::Version;

#[cfg(feature = "admin")]
use crate::secret::Secret;
pub(crate) use crate::servers::{
    Database, Management, MapBroker, Nodes, OptionalBroker, OptionalDatabase,
};

/// Background tasks on RabbitMQ, Postgres or both, in which urgency is structural.
#[derive(Debug, Parser)]
#[command(name = "tierline", version, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  the file cannot be read or has mistakes, the broker or the database does not fit the file, or
     it refuses the operation
  2  the command line is wrong (also a malformed URL, time or filter), or a confirmation is missing
  3  the broker, its management API or the database cannot be reached, or refuses the login
  4  there is no such task, dead letter, operation, schedule or tier

Results go to standard output, errors to standard error. With --json the result, or the error, is
one JSON document on standard output.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Work with the file that maps every task to a tier
    #[command(subcommand)]
    Topology(Topology),

    /// Work with dead letters: list, group, redrive, discard
    #[command(subcommand)]
    Dlq(Box<crate::dlq::arguments::Dlq>),

    /// Serve the admin API over HTTP, behind a token
    #[cfg(feature = "admin")]
    #[command(after_help = "\
The API is at /admin, and its description at /admin/openapi.json. There is no TLS: listen on a
loopback address behind a proxy that has it.

On SIGTERM or Ctrl-C it stops accepting requests, gives open ones the grace period, and ends with
exit code 0. A second signal skips the grace period. A bulk redrive that still runs then is
interrupted: continue it with `tierline dlq redrive FILE --resume OPERATION`.

Example:
  TIERLINE_ADMIN_TOKEN=$(openssl rand -hex 32) tierline serve topology/hotel.toml")]
    Serve {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        broker: MapBroker,
        /// The token that every request must carry, of at least 16 bytes; prefer the variable, since
        /// other users can see command lines
        #[arg(
            long,
            value_name = "TOKEN",
            env = "TIERLINE_ADMIN_TOKEN",
            hide_env_values = true
        )]
        token: Secret,
        /// The address to listen on
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
        listen: std::net::SocketAddr,
        /// How long open requests may take after a shutdown signal
        #[arg(long, value_name = "TIME", default_value = "20s")]
        grace: String,
    },

    /// Work with schedules: list, next, run, pause, resume
    #[command(subcommand)]
    Schedule(crate::schedule::arguments::Schedule),

    /// Work with tasks that are rows in Postgres: list, show, cancel, escalate, audit
    #[command(subcommand)]
    Tasks(Box<crate::tasks::arguments::Tasks>),

    /// Change what runs, without a deploy: pause, limit, override
    #[command(subcommand)]
    Control(Box<crate::control::arguments::Control>),

    /// Show how each tier is doing: depth, oldest age, rates, waits, SLO, dead letters
    #[command(after_help = "\
Answers within two seconds, whatever waits in the queues and tables: up to 10,000 rows of a tier are
counted, and shown as ≥ 10,000 beyond that. What a server did not say is a dash, and the reason is on a
line of its own; the exit code is 1 then.

OLDEST is exact for rows, and an estimate (≈) for queues on RabbitMQ, which do not say how old their
messages are. IN/s, OUT/s, P50 and P99 (of the waits) are of the last five minutes, BUDGET is what is
left of the error budget of the last 24 hours. RUN comes from workers that have the database, and with
--management from the broker, which then also says how many messages are delayed.

Examples:
  tierline stats topology/hotel.toml
  tierline stats topology/hotel.toml --watch=5s --management http://localhost:15672
  tierline stats topology/hotel.toml --json")]
    Stats(Box<crate::stats::arguments::Stats>),

    /// Watch the tiers live in the terminal, look into one, and pause or resume it
    #[command(after_help = "\
Works in 80 columns and over ssh. Press ? for the keys and columns. A pause asks for a reason first,
and is in the audit log. Set NO_COLOR for no colours.

Example:
  tierline top topology/hotel.toml --management http://localhost:15672")]
    Top(Box<crate::top::arguments::Top>),

    /// Create or update the database schema
    #[command(after_help = "\
All tables are in the schema `tierline`. Many processes may migrate at once. If nothing is missing,
nothing changes. The user needs the right to create a schema in the database, once.

Example:
  tierline migrate --postgres postgres://admin:secret@host/hotel")]
    Migrate {
        #[command(flatten)]
        database: Database,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Topology {
    /// Check a file, and list every mistake in it
    #[command(after_help = "\
Needs no broker: run it in CI.

Example:
  tierline topology check topology/hotel.toml")]
    Check {
        #[command(flatten)]
        input: Input,
    },

    /// Show every exchange, queue and binding that the broker must have, and what the database lacks
    #[command(after_help = "\
Changes nothing. The declarations are the same on every version of RabbitMQ; the version decides
whether the file requires a feature that the broker lacks. For tiers in Postgres it shows which
migrations are missing and which tiers have no number yet, if the database is given.

With --postgres it plans for an app that has a database: delays of more than 27 minutes are rows
there and have no queues, unless the file says long_delays = true.

Examples:
  tierline topology plan topology/hotel.toml
  tierline topology plan topology/shop.toml --postgres postgres://localhost/shop
  tierline topology plan topology/hotel.toml --broker-version 3.10
  tierline topology plan topology/hotel.toml --json > plan.json")]
    Plan {
        #[command(flatten)]
        input: Input,
        /// Plan for this version of RabbitMQ, such as 4.3 [default: the version of the
        /// broker if one is given, else the newest]
        #[arg(long, value_name = "VERSION")]
        broker_version: Option<Version>,
        #[command(flatten)]
        broker: OptionalBroker,
        #[command(flatten)]
        database: OptionalDatabase,
    },

    /// Declare missing exchanges, queues and bindings on the broker, and prepare the database
    #[command(after_help = "\
Existing objects do not change: a second run does nothing, and many processes may apply at once.
It deletes nothing. It lists objects that exist with other arguments, with the way out, and declares
all others.

The user needs the permissions to configure, write and read on names that begin with the app's.

On a cluster, repeat --amqp for each node: the queues of the tiers are then declared through the nodes
in turn, so that no node leads all of them.

Tiers in Postgres need --postgres: missing migrations are applied, and each tier gets a number. A file
whose tiers are all in Postgres needs no --amqp. With --postgres no queues for delays of more than 27
minutes are declared: these are rows, unless the file says long_delays = true.

Examples:
  tierline topology apply topology/hotel.toml --amqp amqp://admin:secret@broker/production
  tierline topology apply topology/hotel.toml --amqp amqp://node-1 --amqp amqp://node-2
  AMQP_URL=amqp://localhost tierline topology apply topology/hotel.toml
  tierline topology apply topology/shop.toml --postgres postgres://localhost/shop")]
    Apply {
        #[command(flatten)]
        input: Input,
        #[command(flatten)]
        nodes: Nodes,
        #[command(flatten)]
        management: Management,
        #[command(flatten)]
        database: OptionalDatabase,
    },

    /// Compare the file with the broker and the database, and explain each difference
    #[command(after_help = "\
Changes nothing. Finds objects that are missing, have other arguments or are no longer in the file,
policies that override the file, tiers without consumers, and known problems of the broker's
version. Without the management API it only checks that every object exists, and says so.

For tiers in Postgres it finds missing migrations and indexes, autovacuum that is off, open
transactions that keep Postgres from removing finished rows, and tasks that no worker takes. A file
whose tiers are all in Postgres needs no --amqp.

Notes are not problems: they leave the exit code at 0.

Examples:
  tierline topology doctor topology/shop.toml --postgres postgres://localhost/shop
  tierline topology doctor topology/hotel.toml --amqp amqp://admin:secret@broker/production \\
      --management http://admin:secret@broker:15672")]
    Doctor {
        #[command(flatten)]
        input: Input,
        #[command(flatten)]
        broker: OptionalBroker,
        #[command(flatten)]
        management: Management,
        #[command(flatten)]
        database: OptionalDatabase,
        /// Report transactions of the database that have been open for this long
        #[arg(long, value_name = "TIME", default_value = "1m")]
        long_transaction: String,
    },

    /// Move tiers to where the file puts them, and delete what they had before
    #[command(after_help = "\
A tier moves between \"classic\", \"quorum\" and \"postgres\", or to the next generation of its queue, if the
file says with `formerly` what it was. Workers with that file take from both places. This command says
how far each move is. It deletes the old queue when it is empty and unused, and says when `formerly` can
be removed from the file. It refuses, with exit code 1, what would lose a message: run it again then.

Run it after the last process with the old file has ended. It needs --management to see what workers and
collectors have not acknowledged yet, or --assume-acknowledged.

Examples:
  tierline topology move topology/hotel.toml --dry-run --amqp amqp://localhost --management http://localhost:15672
  tierline topology move topology/hotel.toml bulk --amqp amqp://localhost --postgres postgres://localhost/hotel \
    --assume-acknowledged")]
    Move {
        #[command(flatten)]
        input: Input,
        /// The tier [default: every tier with formerly]
        #[arg(value_name = "TIER")]
        tier: Option<String>,
        /// Say what would be done, and change nothing
        #[arg(long)]
        dry_run: bool,
        /// Delete old queues without the management API: no worker with the old file is shutting down, and no collector
        /// waits for its database
        #[arg(long)]
        assume_acknowledged: bool,
        #[command(flatten)]
        broker: OptionalBroker,
        #[command(flatten)]
        management: Management,
        #[command(flatten)]
        database: OptionalDatabase,
    },

    /// Print what others need of the file: RabbitMQ definitions, alert rules, a dashboard
    #[command(after_help = "\
The definitions are JSON for `rabbitmqctl import_definitions`. They have a user for publishers and
one for the workers of each group, with the permissions that they need and none to declare. The users
have no password, so nobody can log in as them until `rabbitmqctl change_password` sets one. An
import removes the passwords of existing users: use --no-users from the second time on.

Tiers in Postgres have nothing on the broker, so they are not in it. With --postgres neither are the
queues for delays of more than 27 minutes, unless the file says long_delays = true. The command does
not connect to the database.

Examples:
  tierline topology export topology/hotel.toml > hotel.json && rabbitmqctl import_definitions hotel.json
  tierline topology export topology/hotel.toml --no-users --vhost production
  tierline topology export topology/hotel.toml --permissions

--prometheus prints recording and alert rules for Prometheus, and --grafana a dashboard, for what `tierline serve` and apps
export. They select series by job=\"APP\", or by --selector. The guide's page `alerts` has an entry for each alert.

  tierline topology export topology/hotel.toml --prometheus > hotel.rules.yml && promtool check rules hotel.rules.yml
  tierline topology export topology/hotel.toml --grafana --selector 'namespace=\"hotel\"' > hotel.dashboard.json")]
    Export {
        #[command(flatten)]
        input: Input,
        /// The virtual host
        #[arg(long, value_name = "NAME", default_value = "/")]
        vhost: String,
        /// Leave out users and permissions
        #[arg(long, conflicts_with = "permissions")]
        no_users: bool,
        /// Only the permissions, as commands for `rabbitmqctl`
        #[arg(long)]
        permissions: bool,
        /// Recording and alert rules for Prometheus
        #[arg(long, conflicts_with_all = ["permissions", "no_users", "grafana"])]
        prometheus: bool,
        /// A dashboard for Grafana
        #[arg(long, conflicts_with_all = ["permissions", "no_users"])]
        grafana: bool,
        /// The label matchers that select the app's series, in place of job="APP"
        #[arg(long, value_name = "MATCHERS", value_parser = read_selector)]
        selector: Option<String>,
        /// Shorten all times of the rules by this factor, for a rehearsal
        #[arg(long, value_name = "FACTOR", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
        shorten: u32,
        /// The page that alerts link to, if it is not the guide's
        #[arg(long, value_name = "URL")]
        runbook: Option<String>,
        #[command(flatten)]
        database: OptionalDatabase,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Log {
    #[command(flatten)]
    pub(crate) input: Input,
    #[command(flatten)]
    pub(crate) database: Database,
}

#[derive(Debug, Args)]
pub(crate) struct Operator {
    #[command(flatten)]
    pub(crate) author: Author,
    /// Skip the confirmation
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Who makes a change, and why.
#[derive(Debug, Args)]
pub(crate) struct Author {
    /// The operator, for the history
    #[arg(long, value_name = "NAME", env = "USER", default_value = "somebody")]
    pub(crate) by: String,
    /// The reason, for the history
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) because: String,
}

#[derive(Debug, Args)]
pub(crate) struct Input {
    /// The topology file
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    pub(crate) json: bool,
}

impl Topology {
    pub(crate) fn input(&self) -> &Input {
        match self {
            Topology::Check { input }
            | Topology::Plan { input, .. }
            | Topology::Apply { input, .. }
            | Topology::Doctor { input, .. }
            | Topology::Move { input, .. }
            | Topology::Export { input, .. } => input,
        }
    }
}

/// Label matchers without braces, such as `job="hotel"`.
fn read_selector(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.is_empty() || text.contains(['{', '}', '\n', '#']) || !text.contains('=') {
        return Err("write label matchers without braces, such as job=\"hotel\"".to_owned());
    }
    Ok(text.trim_end_matches(',').to_owned())
}

/// A span of time that was given for an option.
pub(crate) fn read_duration(option: &'static str, text: &str) -> Result<Duration, tierline::Error> {
    text.into_duration().map_err(|mut invalid| {
        invalid.setting = option;
        invalid.into()
    })
}
