//! A plan as a table to read.

use std::fmt;

use super::{Argument, Arguments, Binding, DestinationType, Plan};

impl fmt::Display for Argument {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Argument::Int(number) => number.fmt(out),
            Argument::Text(text) => text.fmt(out),
        }
    }
}

/// Three tables: exchanges, queues and bindings, each under a line with its count.
impl fmt::Display for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exchanges = self.exchanges.iter();
        let queues = self.queues.iter();
        write_table(
            out,
            "exchanges",
            ["exchange", "type", "arguments"],
            exchanges
                .map(|e| {
                    [
                        e.name.clone(),
                        e.kind.as_str().to_owned(),
                        show(&e.arguments),
                    ]
                })
                .collect(),
        )?;
        writeln!(out)?;
        write_table(
            out,
            "queues",
            ["queue", "arguments"],
            queues
                .map(|queue| [queue.name.clone(), show(&queue.arguments)])
                .collect(),
        )?;
        writeln!(out)?;
        write_bindings(out, "bindings", &self.bindings)
    }
}

fn write_bindings(out: &mut fmt::Formatter<'_>, what: &str, bindings: &[Binding]) -> fmt::Result {
    write_table(
        out,
        what,
        ["from exchange", "to", "", "routing key", "arguments"],
        bindings
            .iter()
            .map(|binding| {
                let kind = match binding.destination_type {
                    DestinationType::Queue => "queue",
                    DestinationType::Exchange => "exchange",
                };
                let arguments = show(&binding.arguments);
                [
                    binding.source.clone(),
                    kind.to_owned(),
                    binding.destination.clone(),
                    binding.routing_key.clone(),
                    arguments,
                ]
            })
            .collect(),
    )
}

fn show(arguments: &Arguments) -> String {
    arguments
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect::<Vec<_>>()
        .join(" ")
}

fn write_table<const N: usize>(
    out: &mut fmt::Formatter<'_>,
    what: &str,
    head: [&str; N],
    rows: Vec<[String; N]>,
) -> fmt::Result {
    writeln!(out, "{} {what}", rows.len())?;
    // All names and arguments are ASCII, so bytes are columns.
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].len())
            .chain([head[column].len()])
            .max()
    };
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or_default());
    for row in
        std::iter::once(head).chain(rows.iter().map(|row| row.each_ref().map(String::as_str)))
    {
        let cells = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        writeln!(out, "  {}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}
