//! URLs of servers.

/// The same server, another virtual host or database.
pub(crate) fn with_path(server: &str, path: &str) -> String {
    let (address, query) = match server.split_once('?') {
        Some((address, query)) => (address, format!("?{query}")),
        None => (server, String::new()),
    };
    let host_start = address.find("://").map_or(0, |at| at + 3);
    let host_end = address[host_start..]
        .find('/')
        .map_or(address.len(), |at| host_start + at);
    format!("{}/{path}{query}", &address[..host_end])
}

#[cfg(test)]
mod tests {
    use super::with_path;

    #[test]
    fn a_path_replaces_the_one_of_the_url_and_keeps_the_rest() {
        assert_eq!(
            with_path("amqp://a:b@host:5672", "v"),
            "amqp://a:b@host:5672/v"
        );
        assert_eq!(
            with_path("amqp://host/%2f?heartbeat=5", "v"),
            "amqp://host/v?heartbeat=5"
        );
        assert_eq!(
            with_path("postgres://host?sslmode=disable", "x"),
            "postgres://host/x?sslmode=disable"
        );
    }
}
