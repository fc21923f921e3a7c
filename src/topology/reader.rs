//! Reads one table of the file, key by key, and reports what does not fit.
//!
//! Every key that is asked for becomes a known key. [`Reader::finish`] then reports what is left
//! over, with the nearest known key, and what is missing. A value that does not fit is reported and
//! read as absent, so that reading goes on and the whole file is checked in one go.

use std::borrow::Cow;
use std::fmt::Display;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::names::is_plain;
use super::source::Source;
use super::units::{parse_milliseconds, parse_size, show_duration, show_size};

/// A key or value together with its place in the file.
pub(super) type At<T> = Spanned<T>;

pub(super) struct Reader<'f> {
    what: String,
    span: Range<usize>,
    table: &'f DeTable<'f>,
    known: Vec<&'static str>,
    source: &'f Source<'f>,
}

impl<'f> Reader<'f> {
    /// A reader of `table`, which messages call `what` and whose missing keys are reported at `span`.
    pub(super) fn new(
        what: String,
        span: Range<usize>,
        table: &'f DeTable<'f>,
        source: &'f Source<'f>,
    ) -> Self {
        Self {
            what,
            span,
            table,
            known: Vec::new(),
            source,
        }
    }

    /// What messages call this table.
    pub(super) fn what(&self) -> &str {
        &self.what
    }

    /// Where this table begins.
    pub(super) fn span(&self) -> &Range<usize> {
        &self.span
    }

    /// The file, to report what a single table cannot know.
    pub(super) fn source(&self) -> &'f Source<'f> {
        self.source
    }

    /// Whether the file sets `key`, rightly or wrongly.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Reports a mistake at the value of `key`.
    pub(super) fn reject(&self, key: &str, message: impl Into<String>, help: Option<&str>) {
        self.source.report(&self.span_of(key), message, help);
    }

    /// Where the value of `key` is; the table, if it has none.
    pub(super) fn span_of(&self, key: &str) -> Range<usize> {
        self.table
            .get(key)
            .map_or_else(|| self.span.clone(), At::span)
    }

    /// The entries of a table whose keys are the user's own names, in the order of the file.
    pub(super) fn entries(&self) -> Vec<(At<&'f str>, &'f At<DeValue<'f>>)> {
        let named = |(key, value): (&'f At<Cow<'f, str>>, _)| {
            (At::new(key.span(), key.get_ref().as_ref()), value)
        };
        let mut entries: Vec<_> = self.table.iter().map(named).collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        entries
    }

    pub(super) fn text(&mut self, key: &'static str) -> Option<&'f str> {
        match self.take(key)? {
            DeValue::String(text) => Some(text),
            value => self.wrong(key, value, "a string", None),
        }
    }

    pub(super) fn boolean(&mut self, key: &'static str) -> Option<bool> {
        match self.take(key)? {
            DeValue::Boolean(boolean) => Some(*boolean),
            value => self.wrong(key, value, "true or false", None),
        }
    }

    /// One of a few words, each with its meaning.
    pub(super) fn choice<T: Copy>(
        &mut self,
        key: &'static str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let value = self.take(key)?;
        let text = value.as_str().unwrap_or_default();
        if let Some((_, meaning)) = choices.iter().find(|(word, _)| *word == text) {
            return Some(*meaning);
        }
        let words = choices.iter().map(|(word, _)| *word);
        let all: Vec<_> = words.clone().map(quoted).collect();
        let help = did_you_mean(near_miss(text, words));
        self.wrong(key, value, &all.join(" or "), help.as_deref())
    }

    pub(super) fn integer<T>(&mut self, key: &'static str, range: RangeInclusive<T>) -> Option<T>
    where
        T: TryFrom<i64> + PartialOrd + Display,
    {
        let value = self.take(key)?;
        let number = integer_of(value).and_then(|number| T::try_from(number).ok());
        if let Some(number) = number.filter(|number| range.contains(number)) {
            return Some(number);
        }
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        self.wrong(key, value, &expected, None)
    }

    pub(super) fn number(&mut self, key: &'static str, range: RangeInclusive<f64>) -> Option<f64> {
        let value = self.take(key)?;
        let number = match value {
            DeValue::Float(float) => float.as_str().parse().ok(),
            value => integer_of(value).map(|integer| integer as f64),
        };
        if let Some(number) = number.filter(|number| range.contains(number)) {
            return Some(number);
        }
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.wrong(key, value, &expected, None)
    }

    pub(super) fn duration(
        &mut self,
        key: &'static str,
        range: RangeInclusive<Duration>,
    ) -> Option<Duration> {
        self.measure(
            key,
            range,
            ("a duration", "5s"),
            parse_milliseconds,
            show_duration,
        )
    }

    pub(super) fn size(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        self.measure(key, range, ("a size", "16MiB"), parse_size, show_size)
    }

    pub(super) fn texts(&mut self, key: &'static str) -> Option<Vec<At<&'f str>>> {
        let value = self.take(key)?;
        let Some(array) = value.as_array() else {
            return self.wrong(key, value, "a list of names", None);
        };
        let mut texts = Vec::new();
        for element in array.iter() {
            let Some(text) = element.get_ref().as_str() else {
                let found = found(element.get_ref());
                let message = format!(
                    "{key} in {} must list names, found {found} in it",
                    self.what
                );
                self.source.report(&element.span(), message, None);
                return None;
            };
            texts.push(At::new(element.span(), text));
        }
        Some(texts)
    }

    /// The value under `key`, whatever it is.
    pub(super) fn value(&mut self, key: &'static str) -> Option<&'f At<DeValue<'f>>> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        self.table.get(key)
    }

    /// The table under `key`, to be read by a reader of its own.
    pub(super) fn table(&mut self, key: &'static str) -> Option<Reader<'f>> {
        let value = self.take(key)?;
        let Some(table) = value.as_table() else {
            return self.wrong(key, value, "a table", None);
        };
        let (name, _) = self.table.get_key_value(key)?;
        Some(Reader::new(self.path(key), name.span(), table, self.source))
    }

    /// The tables of a section such as `[tiers.NAME]`: the name that the user gave, and its reader.
    pub(super) fn tables(&self) -> Vec<(At<&'f str>, Reader<'f>)> {
        let mut tables = Vec::new();
        for (name, value) in self.entries() {
            let what = self.path(name.get_ref());
            match value.get_ref().as_table() {
                Some(table) => tables.push((
                    name.clone(),
                    Reader::new(what, name.span(), table, self.source),
                )),
                None => self.source.report(
                    &name.span(),
                    format!("{what} must be a table, found {}", found(value.get_ref())),
                    Some(&format!(
                        "write {what} on a line of its own and its settings below it"
                    )),
                ),
            }
        }
        tables
    }

    /// Reports what nobody asked for and, of `required` (keys and how to write them), what is missing.
    pub(super) fn finish(self, required: &[(&'static str, &str)]) {
        let known = || self.known.iter().copied();
        let mut meant = Vec::new();
        for (name, _) in self.entries() {
            if self.known.contains(name.get_ref()) {
                continue;
            }
            let near = near_miss(name.get_ref(), known());
            meant.extend(near);
            let message = format!("unknown key {} in {}", quoted(name.get_ref()), self.what);
            let all = format!("the keys here are {}", self.known.join(", "));
            self.source.report(
                &name.span(),
                message,
                Some(&did_you_mean(near).unwrap_or(all)),
            );
        }
        for (key, how) in required {
            if !self.has(key) && !meant.contains(key) {
                let message = format!("{key} is missing in {}", self.what);
                self.source.report(&self.span, message, Some(how));
            }
        }
    }

    fn take(&mut self, key: &'static str) -> Option<&'f DeValue<'f>> {
        self.value(key).map(At::get_ref)
    }

    fn measure<T: PartialOrd + Copy>(
        &mut self,
        key: &'static str,
        range: RangeInclusive<T>,
        (kind, example): (&str, &str),
        parse: impl Fn(&str) -> Result<T, String>,
        show: impl Fn(T) -> String,
    ) -> Option<T> {
        let value = self.take(key)?;
        let parsed = match value.as_str() {
            Some(text) => parse(text),
            None => Err(format!(
                "write it as a string with its unit, such as {example:?}"
            )),
        };
        match parsed {
            Ok(measure) if range.contains(&measure) => Some(measure),
            Ok(_) => {
                let message = format!("{key} = {} in {} is out of range", found(value), self.what);
                let help = format!(
                    "it may be {} to {}",
                    show(*range.start()),
                    show(*range.end())
                );
                self.reject(key, message, Some(&help));
                None
            }
            Err(help) => self.wrong(key, value, kind, Some(&help)),
        }
    }

    fn wrong<T>(
        &self,
        key: &str,
        value: &DeValue<'_>,
        expected: &str,
        help: Option<&str>,
    ) -> Option<T> {
        let message = format!(
            "{key} in {} must be {expected}, found {}",
            self.what,
            found(value)
        );
        self.reject(key, message, help);
        None
    }

    /// What messages call the table under `key`.
    fn path(&self, key: &str) -> String {
        let key = if is_plain(key) {
            key.to_owned()
        } else {
            quoted(key)
        };
        match self.what.strip_suffix(']') {
            Some(parent) => format!("{parent}.{key}]"),
            None => format!("[{key}]"),
        }
    }
}

/// A value as a message shows it.
pub(super) fn found(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => quoted(text),
        DeValue::Integer(integer) => shortened(&integer.to_string()),
        DeValue::Float(float) => shortened(float.as_str()),
        DeValue::Boolean(boolean) => boolean.to_string(),
        DeValue::Datetime(datetime) => format!("the date {datetime}"),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

/// A name in quotes, escaped and cut so that no file can garble a message.
pub(super) fn quoted(name: &str) -> String {
    format!("{:?}", shortened(name))
}

/// The candidate that `name` is most likely a slip of the pen or an abbreviation for: a third of
/// it may be wrong.
pub(crate) fn near_miss<'c>(
    name: &str,
    candidates: impl Iterator<Item = &'c str>,
) -> Option<&'c str> {
    let name = shortened(name).to_lowercase();
    let length = name.chars().count();
    let distance = |candidate: &str| match candidate.to_lowercase() {
        long if length >= 3 && long.starts_with(&name) => 1,
        other => strsim::osa_distance(&name, &other),
    };
    candidates
        .map(|candidate| (distance(candidate), candidate))
        .filter(|(distance, _)| *distance <= (length / 3).max(1))
        .min()
        .map(|(_, candidate)| candidate)
}

/// The help that names a near miss.
pub(super) fn did_you_mean(near: Option<&str>) -> Option<String> {
    near.map(|near| format!("did you mean {}?", quoted(near)))
}

fn integer_of(value: &DeValue<'_>) -> Option<i64> {
    let integer = value.as_integer()?;
    i64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

fn shortened(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_pen_finds_its_word() {
        let tiers = ["critical", "high", "normal"];
        for (slip, meant) in [
            ("critcal", "critical"),
            ("HIGH", "high"),
            ("hihg", "high"),
            ("normals", "normal"),
            ("crit", "critical"),
        ] {
            assert_eq!(near_miss(slip, tiers.into_iter()), Some(meant));
        }
        for stranger in ["bulk", "", "x", "criminal law"] {
            assert_eq!(near_miss(stranger, tiers.into_iter()), None, "{stranger}");
        }
    }

    #[test]
    fn a_long_or_odd_name_is_cut_and_escaped() {
        assert_eq!(quoted(&"é".repeat(100)), format!("\"{}…\"", "é".repeat(60)));
        assert_eq!(quoted("a\n\u{1b}[31m"), r#""a\n\u{1b}[31m""#);
    }
}
