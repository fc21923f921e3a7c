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

#[test]
fn the_profile_observe_has_the_hotels_rules_and_dashboard() {
    let text = repository_file("docker-compose.yml");
    let compose = &Yaml::load_from_str(&text).unwrap()[0];
    for name in ["rabbitmq", "postgres"] {
        let service = &compose["services"][name];
        assert!(
            !service.contains_mapping_key("profiles"),
            "{name} starts without a profile"
        );
    }
    let mut files = Vec::new();
    for (name, port) in [("prometheus", "9090"), ("grafana", "3000")] {
        let service = &compose["services"][name];
        assert_eq!(service["profiles"][0].as_str(), Some("observe"));
        assert!(service["healthcheck"]["test"].as_sequence().is_some());
        let published = service["ports"][0].as_str().unwrap();
        assert!(published.starts_with("127.0.0.1:"), "{published}");
        assert!(
            published.ends_with(&format!(":-{port}}}:{port}")),
            "{published}"
        );
        for volume in service["volumes"].as_sequence().unwrap() {
            let (from, to) = volume.as_str().unwrap().split_once(':').unwrap();
            match from.strip_prefix("./") {
                Some(file) => files.push((file.to_owned(), to.trim_end_matches(":ro").to_owned())),
                None => assert!(compose["volumes"].contains_mapping_key(from), "{from}"),
            }
        }
    }
    for (file, _) in &files {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
        assert!(path.exists(), "docker would make an empty folder of {file}");
    }
    let mounted = |at: &str| files.iter().find(|(_, to)| to == at).unwrap().0.clone();

    let settings = repository_file(&mounted("/etc/prometheus/prometheus.yml"));
    let settings = &Yaml::load_from_str(&settings).unwrap()[0];
    let rules = mounted(settings["rule_files"][0].as_str().unwrap());
    assert_eq!(rules, "docs/observe/hotel.rules.yml");
    // The rules select series by the job.
    let scrapes = settings["scrape_configs"].as_sequence().unwrap();
    assert_eq!(scrapes.len(), 2);
    for scrape in scrapes {
        let job = &scrape["static_configs"][0]["labels"]["job"];
        assert_eq!(job.as_str(), Some("hotel"));
    }
    assert!(repository_file(&rules).contains("job=\"hotel\""));

    let provisioning = mounted("/etc/grafana/provisioning");
    let source = repository_file(&format!("{provisioning}/datasources/prometheus.yml"));
    let source = &Yaml::load_from_str(&source).unwrap()[0]["datasources"][0];
    assert_eq!(source["type"].as_str(), Some("prometheus"));
    assert_eq!(source["url"].as_str(), Some("http://prometheus:9090"));
    let provider = repository_file(&format!("{provisioning}/dashboards/tierline.yml"));
    let provider = &Yaml::load_from_str(&provider).unwrap()[0]["providers"][0];
    let folder = provider["options"]["path"].as_str().unwrap();
    let dashboard = mounted(&format!("{folder}/hotel.json"));
    let dashboard: serde_json::Value = serde_json::from_str(&repository_file(&dashboard)).unwrap();
    assert_eq!(dashboard["title"], "hotel: tiers");
}
