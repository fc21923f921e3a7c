//! The text of a topology file: byte offsets to lines and columns, and the problems found so far.

use std::cell::RefCell;
use std::ops::Range;

use super::problem::{InvalidTopology, Problem};

const BYTE_ORDER_MARK: char = '\u{feff}';

/// One file while it is being read. Readers share it and report into it.
pub(super) struct Source<'f> {
    file: String,
    text: &'f str,
    line_starts: Vec<usize>,
    problems: RefCell<Vec<Problem>>,
}

impl<'f> Source<'f> {
    pub(super) fn new(file: &str, text: &'f str) -> Self {
        let after_newlines = text.match_indices('\n').map(|(offset, _)| offset + 1);
        Self {
            file: file.into(),
            text,
            line_starts: std::iter::once(0).chain(after_newlines).collect(),
            problems: RefCell::default(),
        }
    }

    pub(super) fn text(&self) -> &'f str {
        self.text
    }

    /// Records a mistake at the start of `span`.
    pub(super) fn report(
        &self,
        span: &Range<usize>,
        message: impl Into<String>,
        help: Option<&str>,
    ) {
        let (line, column) = self.position(span.start);
        self.problems.borrow_mut().push(Problem {
            file: self.file.clone(),
            line,
            column,
            message: message.into(),
            help: help.map(str::to_owned),
        });
    }

    /// The 1-based line of a byte offset, to point at it from the message of another problem.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.position(offset).0
    }

    /// `value` if nothing was reported, else everything that was.
    pub(super) fn finish<T>(self, value: T) -> Result<T, InvalidTopology> {
        if self.problems.borrow().is_empty() {
            Ok(value)
        } else {
            Err(self.refuse())
        }
    }

    /// Everything that was reported, in the order of the file.
    pub(super) fn refuse(self) -> InvalidTopology {
        let mut problems = self.problems.into_inner();
        problems.sort_by_key(|problem| (problem.line, problem.column));
        // Eighty brackets that are never closed are one mistake.
        problems.dedup();
        InvalidTopology::new(problems)
    }

    fn position(&self, offset: usize) -> (usize, usize) {
        let line = self.line_starts.partition_point(|start| *start <= offset);
        let line_start = self.line_starts.get(line - 1).copied().unwrap_or_default();
        let before = self.text.get(line_start..offset).unwrap_or_default();
        let visible = before.trim_start_matches(BYTE_ORDER_MARK);
        (line, visible.chars().count() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_count_characters_and_lines_count_from_one() {
        let source = Source::new("a.toml", "é = 1\r\nß = 2");
        assert_eq!(source.position(0), (1, 1));
        assert_eq!(source.position("é ".len()), (1, 3));
        assert_eq!(source.position("é = 1\r\n".len()), (2, 1));
        assert_eq!(source.position("é = 1\r\nß = ".len()), (2, 5));
    }

    #[test]
    fn a_byte_order_mark_takes_no_column() {
        assert_eq!(Source::new("a.toml", "\u{feff}app = 1").position(3), (1, 1));
    }

    #[test]
    fn an_offset_past_the_end_or_inside_a_character_has_a_position() {
        let source = Source::new("a.toml", "é");
        assert_eq!(source.position(1), (1, 1));
        assert_eq!(source.position(99), (1, 1));
        assert_eq!(Source::new("a.toml", "").position(0), (1, 1));
    }
}
