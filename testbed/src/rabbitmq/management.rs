//! The few calls of RabbitMQ's management API that the testbed needs.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use ureq::http::StatusCode;

const LIMIT: Duration = Duration::from_secs(30);

/// The management API of one node.
#[derive(Clone, Debug)]
pub(crate) struct Management {
    /// With the credentials, which the client turns into a header.
    base: String,
    agent: ureq::Agent,
}

impl Management {
    /// `url` is `http://user:password@host:port`.
    pub(crate) fn at(url: &str) -> Management {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(LIMIT))
            .http_status_as_error(false)
            .build()
            .new_agent();
        Management {
            base: format!("{}/api", url.trim_end_matches('/')),
            agent,
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Value> {
        self.call("GET", path, None).await
    }

    pub(crate) async fn put(&self, path: &str, body: Value) -> Result<Value> {
        self.call("PUT", path, Some(body)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Result<Value> {
        self.call("DELETE", path, None).await
    }

    /// Whether the node passes one of the API's health checks.
    pub(crate) async fn passes(&self, check: &str) -> Result<bool> {
        let (this, path) = (self.clone(), format!("health/checks/{check}"));
        let (status, text) =
            tokio::task::spawn_blocking(move || this.send("GET", &path, None)).await??;
        match status {
            StatusCode::OK => Ok(true),
            StatusCode::SERVICE_UNAVAILABLE => Ok(false),
            _ => bail!("the management API answered the check {check} with {status}: {text}"),
        }
    }

    async fn call(&self, method: &'static str, path: &str, body: Option<Value>) -> Result<Value> {
        let (this, path) = (self.clone(), path.to_owned());
        tokio::task::spawn_blocking(move || this.call_blocking(method, &path, body)).await?
    }

    /// For destructors, which cannot wait for a future.
    pub(crate) fn call_blocking(
        &self,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> Result<Value> {
        let (status, text) = self.send(method, path, body)?;
        if !status.is_success() {
            bail!("the management API answered {method} {path} with {status}: {text}");
        }
        Ok(serde_json::from_str(&text).unwrap_or(Value::Null))
    }

    fn send(&self, method: &str, path: &str, body: Option<Value>) -> Result<(StatusCode, String)> {
        let request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}/{path}", self.base));
        let answer = match body {
            None => self.agent.run(request.body(())?),
            Some(body) => self.agent.run(
                request
                    .header("content-type", "application/json")
                    .body(body.to_string())?,
            ),
        };
        let mut answer =
            answer.with_context(|| format!("the management API did not answer {method} {path}"))?;
        let status = answer.status();
        let text = answer.body_mut().read_to_string().unwrap_or_default();
        Ok((status, text))
    }
}
