//! What the command understands.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use tierline::topology::capabilities::Version;

/// Background tasks on RabbitMQ in which urgency is structural.
#[derive(Debug, Parser)]
#[command(name = "tierline", version, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  all is well
  1  the file has mistakes, the broker differs from it, or the broker refuses it
  2  the command line is wrong
  3  the broker or its management API cannot be reached or lets nobody in

Results go to standard output, errors to standard error. With --json the result, or the error, is
one JSON document on standard output.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Work with the file that maps every task to a tier
    #[command(subcommand)]
    Topology(Topology),
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

    /// Show what the broker must have: every exchange, queue and binding
    #[command(after_help = "\
Changes nothing. The declarations are the same on every version of RabbitMQ; the version decides
whether the file asks for something that the broker does not have.

Examples:
  tierline topology plan topology/hotel.toml
  tierline topology plan topology/hotel.toml --broker-version 3.10
  tierline topology plan topology/hotel.toml --json > plan.json")]
    Plan {
        #[command(flatten)]
        input: Input,
        /// Plan for this version of RabbitMQ, such as 4.3 [default: that of the broker if one is
        /// given, else the newest]
        #[arg(long, value_name = "VERSION")]
        broker_version: Option<Version>,
        #[command(flatten)]
        broker: OptionalBroker,
    },

    /// Declare on the broker what it lacks
    #[command(after_help = "\
What is there already stays as it is: applied again it changes nothing, and many may apply at once.
Nothing is ever deleted. What exists with other arguments is listed, with the way out, and all the
rest is declared. Earlier generations of a tier's queue are unbound: they keep their messages and
get no new ones.

The user needs the permissions to configure, write and read on names that begin with the app's.

Examples:
  tierline topology apply topology/hotel.toml --amqp amqp://admin:secret@broker/production
  AMQP_URL=amqp://localhost tierline topology apply topology/hotel.toml")]
    Apply {
        #[command(flatten)]
        input: Input,
        #[command(flatten)]
        broker: Broker,
        #[command(flatten)]
        management: Management,
    },

    /// Compare the file with the broker, and say what to do
    #[command(after_help = "\
Changes nothing. Finds what is missing or has other arguments, what is no longer in the file,
policies that change what the file says, tiers that nobody works on, and the traps of the broker's
version. Without the management API it sees only whether everything is there, and says so.

Notes are part of a broker that is well: they leave the exit code at 0.

Example:
  tierline topology doctor topology/hotel.toml --amqp amqp://admin:secret@broker/production \\
      --management http://admin:secret@broker:15672")]
    Doctor {
        #[command(flatten)]
        input: Input,
        #[command(flatten)]
        broker: Broker,
        #[command(flatten)]
        management: Management,
    },

    /// Print the file as RabbitMQ definitions, with users and least permissions
    #[command(after_help = "\
The definitions are JSON for `rabbitmqctl import_definitions`. They have a user for publishers and
one for the workers of each group, who may do what they need and declare nothing. The users have no
password, so nobody can log in as them until `rabbitmqctl change_password` has given them one. An
import takes the passwords of existing users away again: use --no-users from the second time on.

Examples:
  tierline topology export topology/hotel.toml > hotel.json && rabbitmqctl import_definitions hotel.json
  tierline topology export topology/hotel.toml --no-users --vhost production
  tierline topology export topology/hotel.toml --permissions")]
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
    },
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

#[derive(Debug, Args)]
pub(crate) struct Broker {
    /// The broker: amqp://user:password@host:5672/virtual-host, or amqps:// for TLS
    #[arg(long, value_name = "URL", env = "AMQP_URL", hide_env_values = true)]
    pub(crate) amqp: String,
}

#[derive(Debug, Args)]
pub(crate) struct OptionalBroker {
    /// The broker: amqp://user:password@host:5672/virtual-host, or amqps:// for TLS
    #[arg(long, value_name = "URL", env = "AMQP_URL", hide_env_values = true)]
    pub(crate) amqp: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Management {
    /// The broker's management API: http://user:password@host:15672, or https://
    #[arg(
        long,
        value_name = "URL",
        env = "MANAGEMENT_URL",
        hide_env_values = true
    )]
    pub(crate) management: Option<String>,
}

impl Topology {
    pub(crate) fn input(&self) -> &Input {
        match self {
            Topology::Check { input }
            | Topology::Plan { input, .. }
            | Topology::Apply { input, .. }
            | Topology::Doctor { input, .. }
            | Topology::Export { input, .. } => input,
        }
    }
}
