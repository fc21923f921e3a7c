//! A count that goes up to a bound.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::backlog::RowCount;

/// A number of tasks. Shown as `1,204`, or as `≥ 10,000` where counting has ended there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Count {
    /// How many there are, or how many were counted.
    pub count: u64,
    /// Whether there may be more.
    pub or_more: bool,
}

impl Count {
    pub(super) fn exactly(count: u64) -> Self {
        Self {
            count,
            or_more: false,
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            count: self.count.saturating_add(other.count),
            or_more: self.or_more || other.or_more,
        }
    }
}

impl From<RowCount> for Count {
    fn from(rows: RowCount) -> Self {
        Self {
            count: rows.count,
            or_more: rows.or_more,
        }
    }
}

impl fmt::Display for Count {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.count.to_string();
        let mut text = String::with_capacity(digits.len() * 2);
        for (place, digit) in digits.chars().enumerate() {
            if place > 0 && (digits.len() - place).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        match self.or_more {
            true => out.pad(&format!("≥ {text}")),
            false => out.pad(&text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_easy_to_read_and_says_where_counting_ended() {
        let shown = |count, or_more| Count { count, or_more }.to_string();
        assert_eq!(shown(0, false), "0");
        assert_eq!(shown(999, false), "999");
        assert_eq!(shown(1_204, false), "1,204");
        assert_eq!(shown(10_000, true), "≥ 10,000");
        assert_eq!(shown(1_234_567, false), "1,234,567");
    }
}
