//! A message with its destination, ready to be sent: to the broker, or as a row to Postgres.

use std::sync::Arc;

use lapin::BasicProperties;

use crate::Error;
use crate::TaskId;
#[cfg(feature = "postgres")]
use crate::backlog::NewRow;
#[cfg(not(feature = "postgres"))]
use crate::error::TopologyError;
use crate::message::Message;
use crate::route::{Address, Destination};
use crate::task::KeyClaim;

/// A message on its way to where it is stored.
#[derive(Debug, Clone)]
pub(crate) enum Outgoing {
    Message(Arc<OutgoingMessage>),
    #[cfg(feature = "postgres")]
    Row(Arc<NewRow>),
}

/// A message for the broker.
#[derive(Debug)]
pub(crate) struct OutgoingMessage {
    /// The tier that it is about. The connections of the tier's group send it.
    pub(crate) tier: String,
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
    pub(crate) content: Content,
}

/// The payload and properties of an outgoing message.
#[derive(Debug)]
pub(crate) enum Content {
    /// A message that was never published before. Its properties are built at each send: that costs no
    /// more than a copy of them.
    New {
        message: Message,
        /// Whether the publisher drew the id, and not the caller.
        is_id_drawn: bool,
        /// The key that it is published with, as a row.
        #[cfg_attr(
            not(feature = "postgres"),
            expect(dead_code, reason = "keys are kept in Postgres")
        )]
        claim: Option<KeyClaim>,
    },
    /// A message that was delivered before: a retry, a dead letter or a redrive.
    Forwarded {
        payload: Vec<u8>,
        properties: BasicProperties,
    },
}

impl Outgoing {
    /// The message of the task with this id, on its way to `destination`.
    ///
    /// # Errors
    /// Where the destination is in Postgres, and the program is built without it.
    pub(crate) fn new(
        destination: Destination,
        #[cfg_attr(not(feature = "postgres"), expect(unused_variables))] id: &TaskId,
        content: Content,
    ) -> Result<Self, Error> {
        let Destination { tier, address, .. } = destination;
        match address {
            Address::Exchange {
                exchange,
                routing_key,
            } => Ok(Self::from(OutgoingMessage {
                tier,
                exchange,
                routing_key,
                content,
            })),
            #[cfg(feature = "postgres")]
            Address::Row { after } => Ok(Self::Row(Arc::new(match content {
                Content::New {
                    mut message,
                    is_id_drawn,
                    claim,
                } => NewRow::first(&mut message, is_id_drawn, claim, after),
                Content::Forwarded {
                    payload,
                    properties,
                } => NewRow::forwarded(tier, after, id, &properties, payload),
            }))),
            #[cfg(not(feature = "postgres"))]
            Address::Row { .. } => {
                let tiers = tier.into();
                Err(Error::Topology(TopologyError::NoDatabase { tiers }))
            }
        }
    }

    /// Whether it goes to Postgres.
    pub(crate) fn is_row(&self) -> bool {
        self.message().is_none()
    }

    /// The message, if it goes to the broker.
    pub(super) fn message(&self) -> Option<&Arc<OutgoingMessage>> {
        match self {
            Self::Message(message) => Some(message),
            #[cfg(feature = "postgres")]
            Self::Row(_) => None,
        }
    }

    pub(super) fn tier(&self) -> &str {
        match self {
            Self::Message(message) => &message.tier,
            #[cfg(feature = "postgres")]
            Self::Row(row) => &row.tier,
        }
    }
}

impl From<OutgoingMessage> for Outgoing {
    fn from(message: OutgoingMessage) -> Self {
        Self::Message(Arc::new(message))
    }
}

impl OutgoingMessage {
    pub(super) fn payload(&self) -> &[u8] {
        match &self.content {
            Content::New { message, .. } => &message.payload,
            Content::Forwarded { payload, .. } => payload,
        }
    }

    pub(super) fn properties(&self) -> BasicProperties {
        match &self.content {
            Content::New {
                message,
                is_id_drawn,
                ..
            } => message.properties(*is_id_drawn),
            Content::Forwarded { properties, .. } => properties.clone(),
        }
    }

    /// The AMQP property `message_id`.
    pub(super) fn id(&self) -> Option<&str> {
        match &self.content {
            Content::New { message, .. } => Some(message.id.as_str()),
            Content::Forwarded { properties, .. } => {
                properties.message_id().as_ref().map(|id| id.as_str())
            }
        }
    }
}
