//! What of an app is up, for the probes of orchestrators.

use std::fmt;

/// What of an app is up; see [`Tierline::health`](crate::Tierline::health).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// The broker, as publishing knows it; `None` where the map needs none.
    pub broker: Option<HealthState>,
    /// The database; `None` where the builder was given none.
    pub database: Option<HealthState>,
}

/// The state of a server that an app needs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HealthState {
    /// It answers.
    Up,
    /// The broker answers, and takes no messages because of a memory or disk alarm.
    Blocked,
    /// It does not answer, or is not prepared. Says why.
    Down(String),
}

impl Health {
    /// Whether everything is up: whether the app should get requests that publish.
    pub fn is_ready(&self) -> bool {
        let servers = [&self.broker, &self.database];
        servers
            .into_iter()
            .flatten()
            .all(|it| *it == HealthState::Up)
    }
}

impl fmt::Display for Health {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let servers = [("broker", &self.broker), ("database", &self.database)];
        let mut separator = "";
        for (name, state) in servers {
            if let Some(state) = state {
                write!(out, "{separator}{name}: {state}")?;
                separator = "\n";
            }
        }
        Ok(())
    }
}

impl fmt::Display for HealthState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Up => out.write_str("up"),
            Self::Blocked => out
                .write_str("blocked: the broker has a memory or disk alarm and takes no messages"),
            Self::Down(why) => write!(out, "down: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_app_is_ready_when_all_that_it_was_given_is_up() {
        let health = |broker, database| Health {
            broker: Some(broker),
            database,
        };
        let down = || HealthState::Down("it is away".to_owned());
        assert!(health(HealthState::Up, None).is_ready());
        assert!(health(HealthState::Up, Some(HealthState::Up)).is_ready());
        assert!(!health(HealthState::Blocked, None).is_ready());
        assert!(!health(HealthState::Up, Some(down())).is_ready());
        let of_database = Health {
            broker: None,
            database: Some(HealthState::Up),
        };
        assert!(of_database.is_ready());
        assert_eq!(of_database.to_string(), "database: up");
        assert_eq!(
            health(down(), Some(HealthState::Up)).to_string(),
            "broker: down: it is away\ndatabase: up"
        );
    }
}
