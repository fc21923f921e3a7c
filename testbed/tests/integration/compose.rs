//! `docker-compose.yml` is for users who have Docker and no servers.

use std::path::Path;

use saphyr::{LoadableYamlNode, Yaml};

#[allow(clippy::unwrap_used, reason = "a test may panic")]
fn repository_file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn the_compose_file_offers_both_servers_on_the_ports_that_the_readme_names() {
    let text = repository_file("docker-compose.yml");
    let documents = Yaml::load_from_str(&text).unwrap();
    let services = &documents[0]["services"];
    let readme = repository_file("README.md");

    let expected = [
        (
            "rabbitmq",
            "rabbitmq:4-management",
            "amqp://guest:guest@localhost:5672",
        ),
        (
            "postgres",
            "postgres:17",
            "postgres://tierline:tierline@localhost:5432/tierline",
        ),
    ];
    for (name, image, url) in expected {
        let service = &services[name];
        assert_eq!(service["image"].as_str(), Some(image));
        assert!(
            service["healthcheck"]["test"].as_sequence().is_some(),
            "{name} has no health check"
        );

        let (volume, _) = service["volumes"][0]
            .as_str()
            .unwrap()
            .split_once(':')
            .unwrap();
        assert!(
            documents[0]["volumes"].contains_mapping_key(volume),
            "{volume} is not a named volume"
        );

        assert!(readme.contains(url), "the README does not name {url}");
        let port = url.rsplit(':').next().unwrap().split('/').next().unwrap();
        let published = service["ports"][0].as_str().unwrap();
        assert!(
            published.ends_with(&format!(":-{port}}}:{port}")),
            "{published} is not {port}"
        );
    }
}
