//! A virtual host for one test.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::management::Management;

const LIMIT: Duration = Duration::from_secs(30);

/// A queue with what it was declared with and what is in it.
#[derive(Clone, Debug, Deserialize)]
pub struct QueueInfo {
    /// Its name.
    pub name: String,
    /// `classic` or `quorum`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The arguments that it was declared with.
    pub arguments: Map<String, Value>,
    /// Messages ready for delivery.
    #[serde(skip)]
    pub depth: u32,
}

/// A virtual host of its own, removed with everything in it when this value is dropped.
#[derive(Debug)]
pub struct Vhost {
    name: String,
    amqp_url: String,
    management: Management,
    has_user: bool,
}

impl Vhost {
    /// Creates a virtual host named after the test that asks for it. `server` is the broker's URL;
    /// its user gets all permissions.
    pub(crate) async fn create(management: Management, server: &str) -> Result<Vhost> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let thread = std::thread::current();
        let test = thread
            .name()
            .and_then(|name| name.rsplit("::").next())
            .unwrap_or("test");
        let name = format!("{test}-{}-{number}", std::process::id());
        // The user who creates a virtual host over the API is given all permissions on it.
        management
            .put(&format!("vhosts/{name}"), json!({}))
            .await
            .with_context(|| format!("could not create the virtual host {name}"))?;
        Ok(Vhost {
            amqp_url: crate::url::with_path(server, &name),
            name,
            management,
            has_user: false,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The URL that leads clients into this virtual host.
    pub fn amqp_url(&self) -> &str {
        &self.amqp_url
    }

    /// All queues in it, by name.
    pub async fn queues(&self) -> Result<Vec<QueueInfo>> {
        let listed = self
            .management
            .get(&format!("queues/{}", self.name))
            .await?;
        let mut queues: Vec<QueueInfo> = serde_json::from_value(listed)?;
        // What the API says of depths is some seconds old.
        let connection = connect(&self.amqp_url).await?;
        for queue in &mut queues {
            queue.depth = depth_on(&connection, &queue.name).await?;
        }
        queues.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(queues)
    }

    /// The names of all queues in it.
    pub async fn queue_names(&self) -> Result<Vec<String>> {
        let listed = self
            .management
            .get(&format!("queues/{}", self.name))
            .await?;
        let queues = listed.as_array().into_iter().flatten();
        Ok(queues
            .filter_map(|queue| queue["name"].as_str().map(str::to_owned))
            .collect())
    }

    /// The node that leads each queue, or that has it, if it is classic.
    pub async fn leaders(&self) -> Result<BTreeMap<String, String>> {
        let path = format!("queues/{}?columns=name,node,leader", self.name);
        let listed = self.management.get(&path).await?;
        let leader = |queue: &Value| {
            let leader = queue["leader"].as_str().or(queue["node"].as_str())?;
            Some((queue["name"].as_str()?.to_owned(), leader.to_owned()))
        };
        let queues = listed.as_array().into_iter().flatten();
        Ok(queues.filter_map(leader).collect())
    }

    /// What a queue was declared with.
    pub async fn arguments(&self, queue: &str) -> Result<Value> {
        let path = format!("queues/{}/{queue}", self.name);
        Ok(self.management.get(&path).await?["arguments"].take())
    }

    /// How often the broker has delivered a message of each queue, as its statistics say, which are some seconds old.
    pub async fn deliveries(&self) -> Result<BTreeMap<String, u64>> {
        let path = format!("queues/{}", self.name);
        let listed = self.management.get(&path).await?;
        let queues = listed.as_array().into_iter().flatten();
        let deliveries = queues.filter_map(|queue| {
            let count = queue["message_stats"]["deliver_get"].as_u64();
            Some((queue["name"].as_str()?.to_owned(), count.unwrap_or(0)))
        });
        Ok(deliveries.collect())
    }

    /// How many messages of a queue are ready for delivery at this moment.
    pub async fn depth(&self, queue: &str) -> Result<u32> {
        depth(&self.amqp_url, queue).await
    }

    /// How many connections and channels clients have open in it.
    pub async fn connections_and_channels(&self) -> Result<(usize, usize)> {
        let mut counts = [0; 2];
        for (count, what) in counts.iter_mut().zip(["connections", "channels"]) {
            let path = format!("vhosts/{}/{what}", self.name);
            let listed = self.management.get(&path).await?;
            *count = listed.as_array().map_or(0, Vec::len);
        }
        Ok(counts.into())
    }

    /// Closes the connections whose client gave them a name that ends like this, and says how many there were.
    pub async fn close_connections(&self, name_ends_with: &str) -> Result<usize> {
        let path = format!("vhosts/{}/connections", self.name);
        let listed = self.management.get(&path).await?;
        let is_meant = |connection: &&Value| {
            let name = connection["user_provided_name"].as_str();
            name.is_some_and(|name| name.ends_with(name_ends_with))
        };
        let meant = listed.as_array().into_iter().flatten().filter(is_meant);
        let mut closed = 0;
        for name in meant.filter_map(|connection| connection["name"].as_str()) {
            let name = name.replace(' ', "%20").replace('>', "%3E");
            self.management
                .delete(&format!("connections/{name}"))
                .await?;
            closed += 1;
        }
        Ok(closed)
    }

    /// Deletes a queue behind its users' backs.
    pub async fn delete_queue(&self, queue: &str) -> Result<()> {
        self.management
            .delete(&format!("queues/{}/{queue}", self.name))
            .await?;
        Ok(())
    }

    /// Adds a user of the same [`name`](Self::name) with this password, who may do everything here. It is
    /// removed together with the virtual host.
    pub async fn add_user(&mut self, password: &str) -> Result<()> {
        let name = &self.name;
        let body = json!({ "password": password, "tags": "" });
        self.management.put(&format!("users/{name}"), body).await?;
        self.has_user = true;
        let all = json!({ "configure": ".*", "write": ".*", "read": ".*" });
        let path = format!("permissions/{name}/{name}");
        self.management.put(&path, all).await?;
        Ok(())
    }

    /// Sets a policy, as an operator would.
    pub async fn set_policy(&self, name: &str, pattern: &str, definition: Value) -> Result<()> {
        let body = json!({ "pattern": pattern, "definition": definition, "apply-to": "queues" });
        self.management
            .put(&format!("policies/{}/{name}", self.name), body)
            .await?;
        Ok(())
    }
}

/// How many messages of a queue are ready for delivery at this moment, asked at `amqp_url`.
pub async fn depth(amqp_url: &str, queue: &str) -> Result<u32> {
    depth_on(&connect(amqp_url).await?, queue).await
}

async fn connect(amqp_url: &str) -> Result<Connection> {
    // The kernel takes connections for a frozen node, which then says nothing.
    let connecting = Connection::connect(amqp_url, ConnectionProperties::default());
    match tokio::time::timeout(LIMIT, connecting).await {
        Ok(connected) => Ok(connected?),
        Err(_) => bail!("the broker did not answer within {LIMIT:?}"),
    }
}

async fn depth_on(connection: &Connection, queue: &str) -> Result<u32> {
    let channel = connection.create_channel().await?;
    let passive = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    let found = channel
        .queue_declare(queue.into(), passive, FieldTable::default())
        .await?;
    let depth = found.message_count();
    channel.close(200, "done".into()).await?;
    Ok(depth)
}

impl Drop for Vhost {
    fn drop(&mut self) {
        let remove = |what: &str| {
            let path = format!("{what}/{}", self.name);
            // A test may have killed its broker: then there is nothing to remove.
            let _ = self.management.call_blocking("DELETE", &path, None);
        };
        remove("vhosts");
        if self.has_user {
            remove("users");
        }
    }
}
