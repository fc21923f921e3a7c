//! Tables that fit a terminal.

use std::fmt::Write;
use std::io::{IsTerminal, stdout};

/// The width of the terminal; `None` if a program reads the output.
fn width() -> Option<usize> {
    if !stdout().is_terminal() {
        return None;
    }
    terminal_size::terminal_size().map(|(width, _)| width.0.into())
}

/// Columns as wide as their widest cell; the last one is cut if the line would be too long.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    draw(head, rows, width())
}

fn draw(head: &[&str], rows: &[Vec<String>], width: Option<usize>) -> String {
    let head = head.iter().map(|cell| (*cell).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head)
        .chain(
            rows.iter()
                .map(|row| row.iter().map(|cell| plain(cell)).collect()),
        )
        .collect();
    let columns = rows[0].len();
    let widest = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns).map(widest).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{cell:<width$}  ");
        }
        text += &cut(line.trim_end(), width);
        text.push('\n');
    }
    text
}

/// A text on one line without control characters: it may come from anywhere.
pub(crate) fn plain(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => ' ',
        // Also without those that change the direction of writing.
        c if c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c) => '\u{fffd}',
        c if ('\u{2066}'..='\u{2069}').contains(&c) => '\u{fffd}',
        c => c,
    };
    text.chars().map(shown).collect()
}

fn cut(line: &str, width: Option<usize>) -> String {
    match width {
        Some(width) if line.chars().count() > width => {
            let kept: String = line.chars().take(width.saturating_sub(1)).collect();
            format!("{kept}…")
        }
        _ => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_fits_and_obeys_nothing_that_is_in_it() {
        let rows = [vec![
            "1".to_owned(),
            "a \u{1b}[31m long\nerror that goes on".to_owned(),
        ]];
        let drawn = draw(&["ID", "ERROR"], &rows, Some(20));
        assert_eq!(drawn, "ID  ERROR\n1   a \u{fffd}[31m long er…\n");
        assert!(draw(&["ID", "ERROR"], &rows, None).contains("goes on"));
    }
}
