//! Checks the frames that the broker sends on their way to lapin.
//!
//! Methods and content headers are buffered until they are complete; bodies and heartbeats pass
//! through. Valid frames reach lapin unchanged.

use super::content_header::{Rewritten, is_in_order, make_utf8, rewrite};

/// How much is read at once.
const READ: usize = 128 << 10;
/// The longest frame that is buffered whole. The broker's default limit is 128 KiB. Of a longer
/// content header only this much is checked.
const LONGEST: usize = 1 << 20;
/// A frame begins with its type, its channel and its length, and ends with a mark.
const HEAD: usize = 7;
const END: u8 = 0xCE;
const OVERHEAD: usize = HEAD + 1;
/// The smallest limit on frames that the protocol allows, which lapin keeps to.
const SMALLEST_LIMIT: u32 = 4096;
/// A content header has 12 bytes before its properties.
const BEFORE_PROPERTIES: usize = 12;

const METHOD: u8 = 1;
const CONTENT_HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;

/// The class and the number of the methods that are checked.
const CONNECTION_START: [u8; 4] = [0, 10, 0, 10];
const CONNECTION_TUNE: [u8; 4] = [0, 10, 0, 30];
const CHANNEL_OPEN_OK: [u8; 4] = [0, 20, 0, 11];
const BASIC_RETURN: [u8; 4] = [0, 60, 0, 50];
const BASIC_DELIVER: [u8; 4] = [0, 60, 0, 60];
const BASIC_GET_OK: [u8; 4] = [0, 60, 0, 71];

/// The bytes that were read from the broker and not yet handed to lapin.
#[derive(Debug)]
pub(crate) struct Frames {
    buffer: Vec<u8>,
    /// The start of the bytes that lapin has not read. Checked bytes end at `checked`, and read bytes
    /// at `filled`.
    begin: usize,
    checked: usize,
    filled: usize,
    /// How many more bytes of the current frame pass unchecked.
    passing: usize,
    /// How many more bytes are discarded: the rest of a content header that is too long to buffer.
    dropping: usize,
    /// Whether the stream is no longer valid AMQP. Everything then passes unchecked, and lapin reports it.
    is_foreign: bool,
    /// The longest frame that lapin takes: 0 for no limit.
    frame_max: u32,
    /// The tag of the last delivery, by channel.
    tags: Vec<u64>,
    notes: Vec<Note>,
}

/// An event in the frames, for the connection.
#[derive(Debug)]
pub(crate) enum Note {
    /// The server's first method, with the server properties.
    Greeting(Vec<u8>),
    /// A channel was opened. Its number may be reused, and its delivery tags begin again.
    ChannelOpened(u16),
    /// The properties of a delivery were rewritten.
    Rewritten {
        channel: u16,
        tag: u64,
        /// The original properties, with their flags.
        original: Vec<u8>,
        problem: String,
        is_unreadable: bool,
    },
}

impl Frames {
    /// `frame_max` is the limit that the client proposes to the broker.
    pub(crate) fn new(frame_max: u32) -> Self {
        Self {
            buffer: Vec::new(),
            begin: 0,
            checked: 0,
            filled: 0,
            passing: 0,
            dropping: 0,
            is_foreign: false,
            frame_max,
            tags: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// The events since the last call.
    pub(crate) fn take_notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes)
    }

    /// Copies checked bytes into `out`, as many as fit.
    pub(crate) fn hand_out(&mut self, out: &mut [u8]) -> usize {
        let length = out.len().min(self.checked - self.begin);
        out[..length].copy_from_slice(&self.buffer[self.begin..self.begin + length]);
        self.begin += length;
        length
    }

    /// Room for what is read next; never empty. Everything checked must be handed out before.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let held = self.begin..self.filled;
        (self.begin, self.checked, self.filled) = (0, 0, held.len());
        if held.is_empty() && self.buffer.len() != READ {
            // It was made longer for a large frame.
            self.buffer = vec![0; READ];
        } else {
            self.buffer.copy_within(held.clone(), 0);
        }
        if self.buffer.len() < held.len() + READ / 2 {
            self.buffer.resize(held.len() + READ, 0);
        }
        &mut self.buffer[self.filled..]
    }

    /// Records how many bytes were read.
    pub(crate) fn fill(&mut self, length: usize) {
        self.filled = (self.filled + length).min(self.buffer.len());
        while self.check_next().is_some() {}
    }

    /// Checks the next frame. `None`: more must be read first.
    fn check_next(&mut self) -> Option<()> {
        if self.is_foreign {
            self.checked = self.filled;
        }
        self.pass();
        let rest = &self.buffer[self.checked..self.filled];
        let head: [u8; HEAD] = *rest.first_chunk()?;
        let [kind, channel @ .., a, b, c, d] = head;
        let channel = u16::from_be_bytes(channel);
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()?;
        let size = length.saturating_add(OVERHEAD);
        match kind {
            BODY | HEARTBEAT => self.passing = size,
            METHOD if size <= LONGEST => {
                let end = self.checked + size;
                let frame = self.buffer[..self.filled].get_mut(self.checked..end)?;
                let method = &mut frame[HEAD..HEAD + length];
                check_method(method);
                self.note_method(channel, self.checked + HEAD..end - 1);
                self.checked = end;
            }
            CONTENT_HEADER if size <= LONGEST => {
                rest.get(..size)?;
                self.check_header(channel, size);
            }
            CONTENT_HEADER => {
                rest.get(..LONGEST)?;
                self.dropping = size - LONGEST;
                self.check_header(channel, LONGEST);
            }
            _ => self.is_foreign = true,
        }
        Some(())
    }

    /// Passes or discards the rest of a frame, as decided at its beginning.
    fn pass(&mut self) {
        let passed = self.passing.min(self.filled - self.checked);
        self.passing -= passed;
        self.checked += passed;
        if self.passing == 0 && self.dropping > 0 {
            let dropped = self.dropping.min(self.filled - self.checked);
            self.dropping -= dropped;
            let behind = self.checked + dropped..self.filled;
            self.buffer.copy_within(behind, self.checked);
            self.filled -= dropped;
        }
    }

    fn note_method(&mut self, channel: u16, payload: std::ops::Range<usize>) {
        let payload = &self.buffer[payload];
        let Some((method, arguments)) = payload.split_first_chunk() else {
            return;
        };
        match *method {
            BASIC_DELIVER => {
                let tag = arguments
                    .first()
                    .map_or(0, |length| 1 + usize::from(*length));
                let tag = number(arguments, tag);
                self.delivered(channel, tag);
            }
            BASIC_GET_OK => {
                let tag = number(arguments, 0);
                self.delivered(channel, tag);
            }
            // What the broker returns has no tag, and is ours.
            BASIC_RETURN => self.delivered(channel, 0),
            CHANNEL_OPEN_OK => self.notes.push(Note::ChannelOpened(channel)),
            CONNECTION_START => self.notes.push(Note::Greeting(payload.to_vec())),
            CONNECTION_TUNE => {
                if let Some([a, b, c, d]) = arguments.get(2..6).and_then(|it| it.first_chunk()) {
                    self.tuned(u32::from_be_bytes([*a, *b, *c, *d]));
                }
            }
            _ => {}
        }
    }

    fn delivered(&mut self, channel: u16, tag: u64) {
        let channel = usize::from(channel);
        if self.tags.len() <= channel {
            self.tags.resize(channel + 1, 0);
        }
        self.tags[channel] = tag;
    }

    /// Notes the broker's limit on frames. lapin takes the smaller of both limits.
    fn tuned(&mut self, frame_max: u32) {
        if frame_max != 0 && (self.frame_max == 0 || frame_max < self.frame_max) {
            self.frame_max = frame_max.max(SMALLEST_LIMIT);
        }
    }

    /// Checks a content header of which `size` bytes are buffered, and rewrites it if lapin cannot parse it.
    fn check_header(&mut self, channel: u16, size: usize) {
        let begin = self.checked;
        let longest = match self.frame_max {
            0 => usize::MAX,
            limit => limit as usize,
        };
        let is_cut = self.dropping > 0;
        let end = begin + size - usize::from(!is_cut);
        let payload = &self.buffer[begin + HEAD..end];
        if !is_cut && is_in_order(payload, longest) {
            self.checked = begin + size;
            return;
        }
        let Rewritten {
            payload: rewritten,
            problem,
            is_unreadable,
        } = rewrite(payload, longest);
        let original = payload.get(BEFORE_PROPERTIES..).unwrap_or_default();
        self.notes.push(Note::Rewritten {
            channel,
            tag: self.tags.get(usize::from(channel)).copied().unwrap_or(0),
            original: original.to_vec(),
            problem,
            is_unreadable,
        });
        let mut frame = self.buffer[begin..begin + HEAD].to_vec();
        let length = u32::try_from(rewritten.len()).unwrap_or(u32::MAX);
        frame[3..HEAD].copy_from_slice(&length.to_be_bytes());
        frame.extend(rewritten);
        frame.push(END);
        self.checked = begin + frame.len();
        self.filled = self.filled - size + frame.len();
        self.buffer.splice(begin..begin + size, frame);
    }
}

/// Makes the strings of a delivery UTF-8. A producer may choose any routing key, and lapin closes the
/// connection over one that it cannot read.
fn check_method(method: &mut [u8]) {
    let Some((name, arguments)) = method.split_first_chunk_mut() else {
        return;
    };
    match *name {
        // The consumer's tag; the delivery tag and a flag; exchange and routing key.
        BASIC_DELIVER => {
            let at = check_string(arguments, 0) + 9;
            let at = check_string(arguments, at);
            check_string(arguments, at);
        }
        // The delivery tag and a flag; exchange and routing key.
        BASIC_GET_OK => {
            let at = check_string(arguments, 9);
            check_string(arguments, at);
        }
        // A code of two bytes; text, exchange and routing key.
        BASIC_RETURN => {
            let at = check_string(arguments, 2);
            let at = check_string(arguments, at);
            check_string(arguments, at);
        }
        _ => {}
    }
}

/// Makes the short string at `at` UTF-8, and returns its end.
fn check_string(arguments: &mut [u8], at: usize) -> usize {
    let length = arguments.get(at).copied().unwrap_or(0);
    let end = at + 1 + usize::from(length);
    if let Some(text) = arguments.get_mut(at + 1..end) {
        make_utf8(text);
    }
    end
}

fn number(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
    bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
}
