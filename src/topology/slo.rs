//! `slo` of a tier: how soon its tasks should start, and how many of them have to.

use std::ops::RangeInclusive;
use std::time::Duration;

use toml::de::DeValue;

use super::reader::Reader;
use super::tier::TIMES;

/// The share of tasks that should start within the SLO, if the file does not say another.
///
/// One late task in a hundred is what a tier can keep whose processes restart with every deploy. A higher default would
/// page people for maps whose authors never asked for that.
pub(super) const DEFAULT_OBJECTIVE: f64 = 0.99;

/// Below one half, an objective says nothing about the tier. Above five nines, a tier of a million tasks a day has a
/// budget of less than ten.
const OBJECTIVES: RangeInclusive<f64> = 0.5..=0.99999;

/// The same as somebody may write them who thinks of percent.
const PERCENT: RangeInclusive<f64> = 50.0..=99.999;

/// Reads `slo`, in its short form (`"5s"`) or as a table: the time to the start, and the objective.
pub(super) fn read(tier: &mut Reader<'_>) -> (Option<Duration>, f64) {
    let is_table = tier
        .value("slo")
        .is_some_and(|value| value.get_ref().as_table().is_some());
    if !is_table {
        return (tier.duration("slo", TIMES), DEFAULT_OBJECTIVE);
    }
    let Some(mut table) = tier.table("slo") else {
        return (None, DEFAULT_OBJECTIVE);
    };
    let (start, objective) = (table.duration("start", TIMES), read_objective(&mut table));
    let how = "write start = \"5s\", say: how soon a task should start";
    table.finish(&[("start", how)]);
    (start, objective.unwrap_or(DEFAULT_OBJECTIVE))
}

fn read_objective(table: &mut Reader<'_>) -> Option<f64> {
    let value = table.value("objective")?.get_ref();
    if let Some(percent) = number_of(value).filter(|number| PERCENT.contains(number)) {
        let message = format!(
            "objective in {} must be a share of the tasks below 1, found {percent}",
            table.what()
        );
        let help = format!("write {} for {percent} %", decimal(percent / 100.0));
        table.reject("objective", message, Some(&help));
        return None;
    }
    table.number("objective", OBJECTIVES)
}

/// A number as a person writes it: without what binary fractions add at the end.
pub(super) fn decimal(number: f64) -> String {
    let text = format!("{number:.9}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn number_of(value: &DeValue<'_>) -> Option<f64> {
    match value {
        DeValue::Float(float) => float.as_str().parse().ok(),
        DeValue::Integer(integer) => integer.as_str().parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::decimal;

    #[test]
    fn a_number_has_no_more_digits_than_a_person_writes() {
        let shown = [1.0 - 0.999, 1.0 - 0.99999, 0.95, 14.4 * 0.001, 3.0].map(decimal);
        assert_eq!(shown, ["0.001", "0.00001", "0.95", "0.0144", "3"]);
    }
}
