//! Checks the properties of a message before lapin parses them.
//!
//! lapin closes the connection over a short string that is not UTF-8, and its parser recurses into
//! nested tables until the stack of its thread overflows, which aborts the process. RabbitMQ accepts
//! and stores both. So this module checks each content header, and rewrites one that lapin
//! cannot parse into one that it can. Pure: bytes in, bytes out.

/// How deep tables and arrays may be nested inside the headers. What RabbitMQ adds itself is two
/// levels deep; lapin's parser overflows its stack after some hundreds.
pub(crate) const MAX_DEPTH: usize = 32;

/// The class, the weight and the size of the body come before the properties.
const FIXED: usize = 12;
/// A frame's type, channel and length come before its payload, an end mark after it.
const FRAME_OVERHEAD: usize = 8;
/// The replacement for a byte that is not UTF-8.
const REPLACEMENT: u8 = b'?';
/// How many problems of one message are described, and how much of each name.
const MOST_PROBLEMS: usize = 8;
const LONGEST_NAME: usize = 100;

const TYPE: &str = "type";

/// The properties of a message in the order of their flags, from the highest bit down.
const PROPERTIES: [(&str, Form); 14] = [
    ("content_type", Form::ShortString),
    ("content_encoding", Form::ShortString),
    ("headers", Form::Table),
    ("delivery_mode", Form::Fixed(1)),
    ("priority", Form::Fixed(1)),
    ("correlation_id", Form::ShortString),
    ("reply_to", Form::ShortString),
    ("expiration", Form::ShortString),
    ("message_id", Form::ShortString),
    ("timestamp", Form::Fixed(8)),
    (TYPE, Form::ShortString),
    ("user_id", Form::ShortString),
    ("app_id", Form::ShortString),
    ("cluster_id", Form::ShortString),
];

#[derive(Clone, Copy)]
enum Form {
    ShortString,
    Table,
    Fixed(usize),
}

/// A content header that lapin parses, in place of one that it does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rewritten {
    /// The payload of the new frame.
    pub(crate) payload: Vec<u8>,
    /// The description of the problem.
    pub(crate) problem: String,
    /// Whether properties are missing or the task's name is changed, so that the
    /// task of the message is unknown.
    pub(crate) is_unreadable: bool,
}

/// Whether lapin parses this payload of a content header frame, given the longest frame that it takes.
pub(crate) fn is_in_order(payload: &[u8], longest_frame: usize) -> bool {
    payload.len() + FRAME_OVERHEAD <= longest_frame && walk(payload).is_some()
}

fn walk(payload: &[u8]) -> Option<()> {
    let mut rest = payload.get(FIXED..)?;
    let mut flags = u16::from_be_bytes(fixed(&mut rest)?);
    // The two lowest bits stand for no property; lapin ignores them too.
    flags &= !0b11;
    while flags != 0 {
        let index = flags.leading_zeros();
        flags &= !(1 << (15 - index));
        match PROPERTIES[index as usize].1 {
            Form::ShortString => short_string(&mut rest)?,
            Form::Table => {
                let mut table = long(&mut rest)?;
                while !table.is_empty() {
                    entry(&mut table, MAX_DEPTH)?;
                }
            }
            Form::Fixed(length) => drop(take(&mut rest, length)?),
        }
    }
    rest.is_empty().then_some(())
}

fn entry(table: &mut &[u8], depth: usize) -> Option<()> {
    short_string(table)?;
    value(table, depth)
}

fn value(rest: &mut &[u8], depth: usize) -> Option<()> {
    let [kind] = fixed(rest)?;
    match width(kind)? {
        Width::Fixed(length) => drop(take(rest, length)?),
        Width::Long => drop(long(rest)?),
        Width::Table => {
            let mut table = long(rest)?;
            let depth = depth.checked_sub(1)?;
            while !table.is_empty() {
                entry(&mut table, depth)?;
            }
        }
        Width::Array => {
            let mut array = long(rest)?;
            let depth = depth.checked_sub(1)?;
            while !array.is_empty() {
                value(&mut array, depth)?;
            }
        }
    }
    Some(())
}

fn short_string(rest: &mut &[u8]) -> Option<()> {
    let [length] = fixed(rest)?;
    let text = take(rest, length.into())?;
    std::str::from_utf8(text).ok().map(drop)
}

/// The encoding of a value after its type byte.
enum Width {
    Fixed(usize),
    /// A length of four bytes, and that many bytes.
    Long,
    Table,
    Array,
}

/// As lapin reads them, which is as RabbitMQ writes them. `None`: it knows no such type.
fn width(kind: u8) -> Option<Width> {
    Some(match kind {
        b'V' => Width::Fixed(0),
        b't' | b'b' | b'B' => Width::Fixed(1),
        b's' | b'U' | b'u' => Width::Fixed(2),
        b'I' | b'i' | b'f' => Width::Fixed(4),
        b'D' => Width::Fixed(5),
        b'L' | b'l' | b'd' | b'T' => Width::Fixed(8),
        b'S' | b'x' => Width::Long,
        b'F' => Width::Table,
        b'A' => Width::Array,
        _ => return None,
    })
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some(taken)
}

fn fixed<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*taken)
}

/// The bytes behind a length of four bytes.
fn long<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = u32::from_be_bytes(fixed(rest)?);
    take(rest, usize::try_from(length).ok()?)
}

/// A content header that lapin parses, as near to this one as can be: an invalid byte of a string is
/// replaced by a question mark, a table or array that is too deep or cannot be read becomes a byte
/// array, what cannot be read at all is left out, and so are headers that do not fit into a frame.
pub(crate) fn rewrite(payload: &[u8], longest_frame: usize) -> Rewritten {
    let mut rewriter = Rewriter::default();
    rewriter.read(payload);
    rewriter.make_room(longest_frame.saturating_sub(FRAME_OVERHEAD));
    rewriter.finish(payload)
}

#[derive(Default)]
struct Rewriter {
    flags: u16,
    before_headers: Vec<u8>,
    headers: Option<Vec<Header>>,
    after_headers: Vec<u8>,
    problems: Vec<String>,
    is_unreadable: bool,
}

/// An entry of the headers, encoded.
struct Header {
    name: String,
    bytes: Vec<u8>,
}

impl Rewriter {
    fn read(&mut self, payload: &[u8]) {
        let mut rest = payload.get(FIXED..).unwrap_or_default();
        let flags = fixed(&mut rest).map_or(0, u16::from_be_bytes);
        for (index, (name, form)) in PROPERTIES.iter().enumerate() {
            let flag = 1 << (15 - index);
            if flags & flag == 0 {
                continue;
            }
            if self.property(name, *form, &mut rest).is_none() {
                self.lost(format!(
                    "the properties cannot be read from {name:?} on, and are left out"
                ));
                return;
            }
            self.flags |= flag;
        }
        if payload.len() < FIXED + 2 || !rest.is_empty() {
            self.lost("the properties do not end where their frame does".to_owned());
        }
    }

    /// `None`: it does not end within the frame.
    fn property(&mut self, name: &str, form: Form, rest: &mut &[u8]) -> Option<()> {
        match form {
            Form::ShortString => {
                let begin = *rest;
                let [length] = fixed(rest)?;
                let mut text = take(rest, length.into())?.to_vec();
                if make_utf8(&mut text) {
                    self.problem(format!("the property {name:?} is not UTF-8"));
                    self.is_unreadable |= name == TYPE;
                }
                self.out().push(begin[0]);
                self.out().extend(text);
            }
            Form::Fixed(length) => {
                let bytes = take(rest, length)?;
                self.out().extend_from_slice(bytes);
            }
            Form::Table => {
                let table = long(rest)?;
                let headers = self.headers(table);
                self.headers = Some(headers);
            }
        }
        Some(())
    }

    /// The properties before the headers, or after them.
    fn out(&mut self) -> &mut Vec<u8> {
        match self.headers {
            None => &mut self.before_headers,
            Some(_) => &mut self.after_headers,
        }
    }

    fn headers(&mut self, mut table: &[u8]) -> Vec<Header> {
        let mut headers = Vec::new();
        while !table.is_empty() {
            let Some(header) = self.header(&mut table) else {
                self.lost(format!(
                    "the headers cannot be read behind the first {}, and are left out from there",
                    headers.len()
                ));
                break;
            };
            headers.push(header);
        }
        headers
    }

    /// The next header. `None`: it does not end within the table, or is of an unknown type.
    fn header(&mut self, table: &mut &[u8]) -> Option<Header> {
        let original = *table;
        let [length] = fixed(table)?;
        let name_end = 1 + usize::from(length);
        let mut name = take(table, length.into())?.to_vec();
        let is_name_changed = make_utf8(&mut name);
        let name = String::from_utf8_lossy(&name).into_owned();
        let [kind] = fixed(table)?;
        match width(kind)? {
            Width::Fixed(length) => drop(take(table, length)?),
            Width::Long | Width::Table | Width::Array => drop(long(table)?),
        }
        let mut bytes = original[..original.len() - table.len()].to_vec();
        bytes[1..name_end].copy_from_slice(name.as_bytes());
        let shown = shortened(&name).to_owned();
        if is_name_changed {
            self.problem(format!("the name of the header {shown:?} is not UTF-8"));
        }
        match make_readable(&mut bytes[name_end..]) {
            Made::AsItWas => {}
            Made::Utf8 => self.problem(format!(
                "the header {shown:?} has names that are not UTF-8"
            )),
            Made::Bytes => self.problem(format!(
                "the header {shown:?} is nested deeper than {MAX_DEPTH} levels or cannot be read, so \
                 that a part of it is now bytes"
            )),
        }
        Some(Header { name, bytes })
    }

    /// Leaves out the largest headers until the rest fits, those that tierline wrote last: without them a
    /// task would begin anew.
    fn make_room(&mut self, longest: usize) {
        let others = FIXED + 2 + self.before_headers.len() + self.after_headers.len() + 4;
        let Some(headers) = &mut self.headers else {
            return;
        };
        let mut size: usize = headers.iter().map(|header| header.bytes.len()).sum();
        if others + size <= longest {
            return;
        }
        let is_ours = |header: &Header| header.name.starts_with("tierline-");
        headers.sort_by_key(|header| (!is_ours(header), header.bytes.len()));
        let mut left_out = Vec::new();
        let mut is_any_ours = false;
        while others + size > longest
            && let Some(header) = headers.pop()
        {
            size -= header.bytes.len();
            is_any_ours |= is_ours(&header);
            if left_out.len() < MOST_PROBLEMS {
                left_out.push(format!("{:?}", shortened(&header.name)));
            }
        }
        let names = left_out.join(", ");
        self.is_unreadable |= is_any_ours;
        self.problem(format!(
            "the headers do not fit into a frame, and the largest are left out: {names}"
        ));
    }

    fn finish(self, payload: &[u8]) -> Rewritten {
        let mut out = payload[..payload.len().min(FIXED)].to_vec();
        out.resize(FIXED, 0);
        out.extend(self.flags.to_be_bytes());
        out.extend(self.before_headers);
        if let Some(headers) = self.headers {
            let table: Vec<u8> = headers
                .into_iter()
                .flat_map(|header| header.bytes)
                .collect();
            // It came out of a frame, whose length has four bytes too.
            let length = u32::try_from(table.len()).unwrap_or(u32::MAX);
            out.extend(length.to_be_bytes());
            out.extend(table);
        }
        out.extend(self.after_headers);
        Rewritten {
            payload: out,
            problem: self.problems.join("; "),
            is_unreadable: self.is_unreadable,
        }
    }

    fn problem(&mut self, problem: String) {
        if self.problems.len() < MOST_PROBLEMS {
            self.problems.push(problem);
        }
    }

    /// A property is missing, and its value is unknown.
    fn lost(&mut self, problem: String) {
        self.is_unreadable = true;
        self.problem(problem);
    }
}

/// How a value was changed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Made {
    AsItWas,
    /// Names inside it were made UTF-8.
    Utf8,
    /// It, or a table or array inside it, became a byte array.
    Bytes,
}

/// Makes a value readable, in place: its length stays.
fn make_readable(value: &mut [u8]) -> Made {
    let mut at = 0;
    // Its type and length are known to be good, so this always succeeds.
    readable_value(value, &mut at, MAX_DEPTH).unwrap_or(Made::Bytes)
}

/// `None`: the value does not end within `bytes`, or is of an unknown type.
fn readable_value(bytes: &mut [u8], at: &mut usize, depth: usize) -> Option<Made> {
    let begin = *at;
    let mut rest = &bytes[begin..];
    let [kind] = fixed(&mut rest)?;
    let is_table = match width(kind)? {
        Width::Fixed(length) => {
            take(&mut rest, length)?;
            *at = bytes.len() - rest.len();
            return Some(Made::AsItWas);
        }
        Width::Long => {
            long(&mut rest)?;
            *at = bytes.len() - rest.len();
            return Some(Made::AsItWas);
        }
        Width::Table => true,
        Width::Array => false,
    };
    let inside = long(&mut rest)?.to_vec();
    let end = bytes.len() - rest.len();
    *at = end;
    let inside_begin = end - inside.len();
    let entries = match depth.checked_sub(1) {
        Some(depth) => readable_entries(&mut bytes[inside_begin..end], depth, is_table),
        None => None,
    };
    Some(entries.unwrap_or_else(|| {
        bytes[begin] = b'x';
        bytes[inside_begin..end].copy_from_slice(&inside);
        Made::Bytes
    }))
}

fn readable_entries(bytes: &mut [u8], depth: usize, is_table: bool) -> Option<Made> {
    let mut at = 0;
    let mut made = Made::AsItWas;
    while at < bytes.len() {
        if is_table {
            let end = at + 1 + usize::from(bytes[at]);
            if make_utf8(bytes.get_mut(at + 1..end)?) {
                made = made.max(Made::Utf8);
            }
            at = end;
        }
        made = made.max(readable_value(bytes, &mut at, depth)?);
    }
    Some(made)
}

/// Replaces each byte that is not part of a UTF-8 character. Returns whether there was one.
pub(crate) fn make_utf8(bytes: &mut [u8]) -> bool {
    let mut from = 0;
    let mut is_changed = false;
    while let Err(error) = std::str::from_utf8(&bytes[from..]) {
        from += error.valid_up_to();
        let length = error.error_len().unwrap_or(bytes.len() - from);
        bytes[from..from + length].fill(REPLACEMENT);
        is_changed = true;
    }
    is_changed
}

fn shortened(name: &str) -> &str {
    &name[..name.floor_char_boundary(LONGEST_NAME)]
}
