//! The report of a run.

use std::fmt;
use std::time::Duration;

use crate::conduct::{Order, RECOVERY_LIMIT};
use crate::fault::Happened;
use crate::ledger::Millis;
use crate::plan::Step;
use crate::progress::{longest_gap, recovery};
use crate::verdict::Verdict;

/// How many lost tasks are shown.
const SHOWN: usize = 20;

/// The results of a run.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) order: Order,
    pub(crate) version: String,
    /// Tasks a second before the first fault.
    pub(crate) former: f64,
    steps: Vec<(Step, Happened)>,
    /// When tasks ended, sorted.
    pub(crate) times: Vec<Millis>,
    /// When publishing stopped.
    pub(crate) end: Millis,
    pub(crate) length: Duration,
    pub(crate) is_drained: bool,
    pub(crate) verdict: Verdict,
    pub(crate) unasked_ends: u32,
}

impl Report {
    pub(crate) fn new(order: Order, version: String) -> Report {
        Report {
            order,
            version,
            former: 0.0,
            steps: Vec::new(),
            times: Vec::new(),
            end: 0,
            length: Duration::ZERO,
            is_drained: false,
            verdict: Verdict::default(),
            unasked_ends: 0,
        }
    }

    pub(crate) fn add(&mut self, step: &Step, happened: Happened) {
        self.steps.push((step.clone(), happened));
    }

    /// Whether no task was lost, none is a false crash loop, and all ended.
    pub(crate) fn is_well(&self) -> bool {
        self.is_drained && self.verdict.lost.is_empty() && self.verdict.crash_loops == 0
    }

    pub(crate) fn faults(&self) -> usize {
        let is_done = |(step, happened): &&(Step, Happened)| {
            step.beside.is_some() && !happened.is_beside_undone
        };
        let beside = self.steps.iter().filter(is_done);
        self.steps.len() + beside.count() - self.failed()
    }

    /// Faults that could not be injected or healed as planned.
    fn failed(&self) -> usize {
        let failed = |(_, happened): &&(Step, Happened)| happened.failed.is_some();
        self.steps.iter().filter(failed).count()
    }

    /// The longest time without progress after each fault.
    fn gaps(&self) -> impl Iterator<Item = (&Step, Duration)> {
        self.steps
            .iter()
            .enumerate()
            .map(|(number, (step, happened))| {
                let gap = longest_gap(&self.times, happened.begin, self.next_begin(number));
                (step, gap)
            })
    }

    pub(crate) fn worst_gap(&self) -> Option<(&Step, Duration)> {
        self.gaps().max_by_key(|(_, gap)| *gap)
    }

    /// How long after each return of a node the throughput reached 0.9 of what it was before, if it did.
    /// During a rolling restart only the last one counts: before, the next node goes down.
    pub(crate) fn recoveries(&self) -> Vec<(&Step, Option<Duration>)> {
        let steps = self.steps.iter().enumerate();
        let returned = steps.filter_map(|(number, (step, happened))| {
            let accepted = *happened.accepted.last()?;
            let until = self.next_begin(number);
            let took = recovery(&self.times, accepted, until, self.former);
            Some((step, took))
        });
        returned.collect()
    }

    fn next_begin(&self, number: usize) -> Millis {
        let next = self.steps.get(number + 1);
        next.map_or(self.end, |(_, happened)| happened.begin)
    }

    fn write_steps(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "longest time without progress after each fault:")?;
        for ((step, gap), (_, happened)) in self.gaps().zip(&self.steps) {
            let (gap, lasted) = (gap.as_secs_f64(), happened.end - happened.begin);
            let lasted = lasted as f64 / 1_000.0;
            let failed = happened.failed.as_ref().map_or("", |_| ", failed");
            write!(
                out,
                "  {gap:>5.1} s  {} (lasted {lasted:.1} s{failed})",
                step.fault
            )?;
            match &step.beside {
                Some((_, beside)) => writeln!(out, " and {beside}")?,
                None => writeln!(out)?,
            }
        }
        let limit = RECOVERY_LIMIT.as_secs();
        let former = self.former;
        writeln!(
            out,
            "at 0.9 of the former {former:.0} tasks/s after a node accepted connections (promised: {limit} s):"
        )?;
        for (step, took) in self.recoveries() {
            match took {
                Some(took) => writeln!(out, "  {:>5.1} s  {}", took.as_secs_f64(), step.fault)?,
                None => writeln!(out, "  not before the next fault: {}", step.fault)?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict {
            confirmed,
            executed,
            repeated,
            too_many,
            dead,
            crash_loops,
            unexpected,
            expired,
            slowest,
            unconfirmed,
            refused,
            deleted,
            lost,
        } = &self.verdict;
        self.write_steps(out)?;
        let order = &self.order;
        writeln!(
            out,
            "RabbitMQ {}, {} node(s), seed {}, {} faults in {:.0} s, {} failed",
            self.version,
            order.nodes,
            order.seed,
            self.faults(),
            self.length.as_secs_f64(),
            self.failed()
        )?;
        writeln!(out, "  confirmed           {confirmed:>7}")?;
        writeln!(out, "  executed            {executed:>7}")?;
        writeln!(
            out,
            "  more than once      {repeated:>7} ({too_many} runs too many)"
        )?;
        writeln!(out, "  dead-lettered       {dead:>7}")?;
        if !unexpected.is_empty() {
            writeln!(out, "    not meant to fail: {unexpected:?}")?;
        }
        if *crash_loops > 0 {
            writeln!(
                out,
                "    FALSE CRASH LOOPS (no task kills its worker): {crash_loops}"
            )?;
        }
        writeln!(out, "  expired             {expired:>7}")?;
        writeln!(out, "  gone with a queue   {deleted:>7}")?;
        let slowest = *slowest as f64 / 1_000.0;
        writeln!(
            out,
            "  slowest             {slowest:>7.1} s from confirm to run"
        )?;
        writeln!(out, "  ran unconfirmed     {unconfirmed:>7}")?;
        writeln!(out, "  publish errors      {refused:?}")?;
        writeln!(out, "  unplanned restarts  {:>7}", self.unasked_ends)?;
        writeln!(out, "  drained             {:>7}", self.is_drained)?;
        writeln!(out, "  LOST                {:>7}", lost.len())?;
        for lost in lost.iter().take(SHOWN) {
            writeln!(out, "    {lost:?}")?;
        }
        Ok(())
    }
}
