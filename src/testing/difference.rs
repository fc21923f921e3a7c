//! The difference of two JSON values, as text.

use std::collections::BTreeSet;

use serde_json::Value;

/// A line for every path at which the values differ; none if they are equal.
pub(super) fn differences(expected: &Value, published: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    compare("", Some(expected), Some(published), &mut lines);
    lines
}

fn compare(
    path: &str,
    expected: Option<&Value>,
    published: Option<&Value>,
    lines: &mut Vec<String>,
) {
    match (expected, published) {
        (Some(Value::Object(expected)), Some(Value::Object(published))) => {
            let keys: BTreeSet<&String> = expected.keys().chain(published.keys()).collect();
            for key in keys {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                compare(&path, expected.get(key), published.get(key), lines);
            }
        }
        (Some(Value::Array(expected)), Some(Value::Array(published))) => {
            for index in 0..expected.len().max(published.len()) {
                let path = format!("{path}[{index}]");
                compare(&path, expected.get(index), published.get(index), lines);
            }
        }
        (expected, published) if expected == published => {}
        (expected, published) => {
            let path = if path.is_empty() { "the payload" } else { path };
            lines.push(format!(
                "  {path}: expected {}, published {}",
                shown(expected),
                shown(published)
            ));
        }
    }
}

fn shown(value: Option<&Value>) -> String {
    value.map_or_else(|| "nothing".to_owned(), Value::to_string)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn equal_values_have_no_differences() {
        let value = json!({"a": [1, {"b": null}], "c": "d"});
        assert!(differences(&value, &value).is_empty());
    }

    #[test]
    fn every_difference_is_told_with_its_place() {
        let expected = json!({"guest": {"name": "Ada", "room": 12}, "nights": [1, 2]});
        let published = json!({"guest": {"name": "Bea", "floor": 1}, "nights": [1, 2, 3]});
        assert_eq!(
            differences(&expected, &published),
            [
                "  guest.floor: expected nothing, published 1",
                "  guest.name: expected \"Ada\", published \"Bea\"",
                "  guest.room: expected 12, published nothing",
                "  nights[2]: expected nothing, published 3",
            ]
        );
    }
}
