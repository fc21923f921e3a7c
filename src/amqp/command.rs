//! The commands that declare, bind and look up objects on a broker.

use std::fmt;

use lapin::options::{
    ExchangeBindOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, ExchangeUnbindOptions,
    QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, ExchangeKind};

use crate::topology::plan::{self, Argument, Arguments, Binding, DestinationType, Exchange, Queue};

/// One AMQP command, which the broker executes or refuses.
#[derive(Debug, Clone, Copy)]
pub(super) enum Command<'a> {
    DeclareExchange(&'a Exchange),
    DeclareQueue(&'a Queue),
    Bind(&'a Binding),
    Unbind(&'a Binding),
    FindExchange(&'a str),
    FindQueue(&'a str),
    DeleteExchange(&'a str),
    DeleteQueue {
        name: &'a str,
        /// Whether the broker refuses while the queue has messages or consumers. Only classic queues implement it.
        only_if_unused: bool,
    },
}

/// How many messages and consumers a queue has; zero for other commands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) messages: u32,
    pub(super) consumers: u32,
}

impl Command<'_> {
    pub(super) async fn run(&self, channel: &Channel) -> lapin::Result<Counts> {
        match *self {
            Command::DeclareExchange(exchange) => {
                let options = ExchangeDeclareOptions {
                    durable: exchange.durable,
                    auto_delete: exchange.auto_delete,
                    ..ExchangeDeclareOptions::default()
                };
                let (name, kind) = (exchange.name.as_str().into(), kind(exchange.kind));
                let arguments = table(&exchange.arguments);
                channel
                    .exchange_declare(name, kind, options, arguments)
                    .await?;
            }
            Command::DeclareQueue(queue) => {
                let options = QueueDeclareOptions {
                    durable: queue.durable,
                    auto_delete: queue.auto_delete,
                    ..QueueDeclareOptions::default()
                };
                let (name, arguments) = (queue.name.as_str().into(), table(&queue.arguments));
                channel.queue_declare(name, options, arguments).await?;
            }
            Command::Bind(binding) => bind(channel, binding).await?,
            Command::Unbind(binding) => unbind(channel, binding).await?,
            Command::FindExchange(name) => {
                let options = ExchangeDeclareOptions {
                    passive: true,
                    ..ExchangeDeclareOptions::default()
                };
                // The broker ignores the kind of a passive declaration.
                let kind = ExchangeKind::Direct;
                let arguments = FieldTable::default();
                channel
                    .exchange_declare(name.into(), kind, options, arguments)
                    .await?;
            }
            Command::FindQueue(name) => {
                let options = QueueDeclareOptions {
                    passive: true,
                    ..QueueDeclareOptions::default()
                };
                let arguments = FieldTable::default();
                let queue = channel
                    .queue_declare(name.into(), options, arguments)
                    .await?;
                return Ok(Counts {
                    messages: queue.message_count(),
                    consumers: queue.consumer_count(),
                });
            }
            Command::DeleteExchange(name) => {
                let options = ExchangeDeleteOptions::default();
                channel.exchange_delete(name.into(), options).await?;
            }
            Command::DeleteQueue {
                name,
                only_if_unused,
            } => {
                let options = QueueDeleteOptions {
                    if_unused: only_if_unused,
                    if_empty: only_if_unused,
                    ..QueueDeleteOptions::default()
                };
                channel.queue_delete(name.into(), options).await?;
            }
        }
        Ok(Counts::default())
    }

    /// The permissions that a user needs for it, in the words of `rabbitmqctl set_permissions`.
    pub(super) fn permissions(&self) -> String {
        let declaring =
            |name: &str, arguments: &Arguments, target: &str| match arguments.get(target) {
                None => format!("configure on {name:?}"),
                Some(target) => {
                    format!("configure and read on {name:?}, and write on \"{target}\"")
                }
            };
        match self {
            Command::DeclareExchange(exchange) => {
                declaring(&exchange.name, &exchange.arguments, "alternate-exchange")
            }
            Command::DeclareQueue(queue) => {
                declaring(&queue.name, &queue.arguments, "x-dead-letter-exchange")
            }
            Command::Bind(binding) | Command::Unbind(binding) => {
                let (source, destination) = (&binding.source, &binding.destination);
                format!("write on {destination:?} and read on {source:?}")
            }
            Command::FindExchange(_) | Command::FindQueue(_) => {
                "access to the virtual host".to_owned()
            }
            Command::DeleteExchange(name) | Command::DeleteQueue { name, .. } => {
                format!("configure on {name:?}")
            }
        }
    }
}

async fn bind(channel: &Channel, binding: &Binding) -> lapin::Result<()> {
    let destination = binding.destination.as_str().into();
    let source = binding.source.as_str().into();
    let key = binding.routing_key.as_str().into();
    let arguments = table(&binding.arguments);
    match binding.destination_type {
        DestinationType::Queue => {
            let options = QueueBindOptions::default();
            channel
                .queue_bind(destination, source, key, options, arguments)
                .await
        }
        DestinationType::Exchange => {
            let options = ExchangeBindOptions::default();
            channel
                .exchange_bind(destination, source, key, options, arguments)
                .await
        }
    }
}

async fn unbind(channel: &Channel, binding: &Binding) -> lapin::Result<()> {
    let destination = binding.destination.as_str().into();
    let source = binding.source.as_str().into();
    let key = binding.routing_key.as_str().into();
    let arguments = table(&binding.arguments);
    match binding.destination_type {
        DestinationType::Queue => {
            channel
                .queue_unbind(destination, source, key, arguments)
                .await
        }
        DestinationType::Exchange => {
            let options = ExchangeUnbindOptions::default();
            channel
                .exchange_unbind(destination, source, key, options, arguments)
                .await
        }
    }
}

fn kind(kind: plan::ExchangeKind) -> ExchangeKind {
    match kind {
        plan::ExchangeKind::Direct => ExchangeKind::Direct,
        plan::ExchangeKind::Topic => ExchangeKind::Topic,
        plan::ExchangeKind::Headers => ExchangeKind::Headers,
        plan::ExchangeKind::Fanout => ExchangeKind::Fanout,
    }
}

fn table(arguments: &Arguments) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, argument) in arguments {
        let value = match argument {
            Argument::Int(number) => AMQPValue::LongLongInt(*number),
            Argument::Text(text) => AMQPValue::LongString(text.as_str().into()),
        };
        table.insert(name.as_str().into(), value);
    }
    table
}

/// The text for "tried to …" in errors.
impl fmt::Display for Command<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Command::DeclareExchange(exchange) => {
                write!(out, "declare the exchange {:?}", exchange.name)
            }
            Command::DeclareQueue(queue) => write!(out, "declare the queue {:?}", queue.name),
            Command::Bind(Binding {
                source,
                destination,
                ..
            }) => {
                write!(out, "bind {destination:?} to the exchange {source:?}")
            }
            Command::Unbind(Binding {
                source,
                destination,
                ..
            }) => {
                write!(out, "unbind {destination:?} from the exchange {source:?}")
            }
            Command::FindExchange(name) => write!(out, "look for the exchange {name:?}"),
            Command::FindQueue(name) => write!(out, "look for the queue {name:?}"),
            Command::DeleteExchange(name) => write!(out, "delete the exchange {name:?}"),
            Command::DeleteQueue { name, .. } => write!(out, "delete the queue {name:?}"),
        }
    }
}
