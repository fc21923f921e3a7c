//! Weighted order: the share of starts that each tier gets while all have a backlog.

use anyhow::Result;
use tierline_benchmarks::Report;

use crate::scene::Scene;

const TIERS: [(&str, f64); 5] = [
    ("one", 8.0),
    ("two", 4.0),
    ("three", 2.0),
    ("four", 1.0),
    ("five", 0.5),
];

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let counted = if is_quick { 1_000 } else { 3_000 };
    let total: f64 = TIERS.iter().map(|(_, weight)| weight).sum();
    println!("\nWeighted order, five tiers with a backlog, tasks of 5 ms, 8 slots, prefetch 4");
    for queue in ["classic", "quorum"] {
        let scene = Scene::set(&map(queue)).await?;
        for (tier, weight) in TIERS {
            // Enough that none runs dry before all are counted.
            let backlog = (counted as f64 * weight / total * 1.5) as usize + 100;
            scene.publish(tier, std::iter::repeat_n(5, backlog)).await?;
        }
        let working = scene.work();
        scene.record.until(counted).await?;
        working.end().await?;
        let starts = scene.record.starts();
        for (tier, weight) in TIERS {
            let of_tier = starts[..counted]
                .iter()
                .filter(|it| it.tier == tier)
                .count();
            let (got, asked) = (of_tier as f64 / counted as f64, weight / total);
            let what = format!(
                "{queue}, weight {weight}: a share of {:.1} % ± 2",
                asked * 100.0
            );
            let found = format!("{:.1} %", got * 100.0);
            println!("  {what}: {found}");
            report.check(what, found, (got - asked).abs() <= 0.02);
        }
    }
    Ok(())
}

fn map(queue: &str) -> String {
    let mut map = "app = \"bench\"\n".to_owned();
    for (tier, weight) in TIERS {
        map += &format!("[tiers.{tier}]\nqueue = \"{queue}\"\nweight = {weight:.1}\n");
    }
    map += r#"
        [groups.all]
        tiers = ["one", "two", "three", "four", "five"]
        order = "weighted"
        concurrency = 8
        prefetch = 4
        [tasks]
    "#;
    for (tier, _) in TIERS {
        map += &format!("{tier} = \"{tier}\"\n");
    }
    map
}
