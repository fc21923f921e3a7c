//! Error budgets.

/// Which part of the error budget is left: 1 where every start met the SLO, 0 where as many were late as the objective
/// allows, and negative beyond. `None`: nothing counts.
pub(super) fn budget_left(objective: f64, met: u64, counted: u64) -> Option<f64> {
    if counted == 0 {
        return None;
    }
    let missed = counted.saturating_sub(met) as f64 / counted as f64;
    let allowed = 1.0 - objective;
    Some(match allowed > 0.0 {
        true => 1.0 - missed / allowed,
        false if missed > 0.0 => 0.0,
        false => 1.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_used_up_by_what_starts_late() {
        let left = |met, counted| budget_left(0.99, met, counted).map(|it| (it * 100.0).round());
        assert_eq!(left(0, 0), None);
        assert_eq!(left(1_000, 1_000), Some(100.0));
        assert_eq!(left(995, 1_000), Some(50.0));
        assert_eq!(left(990, 1_000), Some(0.0));
        assert_eq!(left(980, 1_000), Some(-100.0));
        assert_eq!(budget_left(1.0, 9, 10), Some(0.0));
        assert_eq!(budget_left(1.0, 10, 10), Some(1.0));
    }
}
