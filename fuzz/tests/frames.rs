//! Bytes that a broker may send, in whatever pieces they arrive: lapin parses what it gets.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

/// The files that check what the broker sends, as they are in the library.
#[allow(dead_code, reason = "not all of it is called here")]
#[path = "../../src/amqp/stream"]
mod stream {
    pub(crate) mod content_header;
    pub(crate) mod frames;
}

use amq_protocol::frame::{AMQPFrame, parse_frame};
use stream::frames::{Frames, Note};
use tierline_fuzz::{Edit, edited};

const FRAME_MAX: u32 = 131_072;

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    [&[kind, 0, 1], &length.to_be_bytes()[..], payload, &[0xCE]].concat()
}

/// What lapin gets when this is sent in pieces of these sizes.
fn passed(frames: &mut Frames, sent: &[u8], pieces: &[u8]) -> Vec<u8> {
    let mut sizes = pieces.iter().map(|size| usize::from(*size) + 1);
    let (mut rest, mut got, mut out) = (sent, Vec::new(), [0; 4096]);
    while !rest.is_empty() {
        let room = frames.room();
        let size = sizes
            .next()
            .unwrap_or(rest.len())
            .min(rest.len())
            .min(room.len());
        room[..size].copy_from_slice(&rest[..size]);
        frames.fill(size);
        rest = &rest[size..];
        loop {
            match frames.hand_out(&mut out) {
                0 => break,
                length => got.extend_from_slice(&out[..length]),
            }
        }
    }
    got
}

/// A delivery whose content header has this payload, and its body.
fn delivery(tag: u64, header: &[u8]) -> Vec<u8> {
    let method = [
        &[0, 60, 0, 60, 1, b'c'],
        &tag.to_be_bytes()[..],
        &[0, 0, 1, 0xff],
    ]
    .concat();
    [frame(1, &method), frame(2, header), frame(3, b"x")].concat()
}

/// lapin must parse both frames of a delivery, and what comes behind them.
fn check(header: &[u8], pieces: &[u8]) {
    let sent = delivery(7, header);
    let mut frames = Frames::new(FRAME_MAX);
    let got = passed(&mut frames, &sent, pieces);
    let mut rest = &got[..];
    let mut kinds = Vec::new();
    while !rest.is_empty() {
        let (after, frame) = parse_frame(rest).expect("lapin would close the connection");
        assert!(rest.len() - after.len() <= FRAME_MAX as usize);
        kinds.push(match frame {
            AMQPFrame::Method(1, _) => 1,
            AMQPFrame::Header(1, parsed) => {
                // What is left of the message has as many bytes as before.
                if let Some(size) = header.get(4..12) {
                    let size = u64::from_be_bytes(size.try_into().unwrap());
                    assert_eq!(parsed.body_size, size);
                }
                2
            }
            AMQPFrame::Body(1, _) => 3,
            other => panic!("{other:?}"),
        });
        rest = after;
    }
    assert_eq!(kinds, [1, 2, 3]);
    for note in frames.take_notes() {
        let Note::Rewritten {
            tag,
            original,
            problem,
            ..
        } = note
        else {
            panic!("{note:?}");
        };
        assert_eq!((tag, &*original), (7, header.get(12..).unwrap_or_default()));
        assert!(!problem.is_empty());
    }
}

/// The fixed part of a content header.
const FIXED: [u8; 12] = [0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];

#[test]
fn any_content_header_reaches_lapin_in_a_form_that_it_parses() {
    bolero::check!()
        .with_type::<(Vec<u8>, Vec<u8>)>()
        .for_each(|(properties, pieces)| {
            check(&[&FIXED, &properties[..]].concat(), pieces);
            check(properties, pieces);
        });
}

/// All properties there are, and headers of every type.
fn rich() -> Vec<u8> {
    let mut headers = Vec::new();
    for (kind, value) in [
        (b't', &[1][..]),
        (b'b', &[0xff]),
        (b'B', &[0xff]),
        (b's', &[1, 2]),
        (b'U', &[1, 2]),
        (b'u', &[1, 2]),
        (b'I', &[0; 4]),
        (b'i', &[0; 4]),
        (b'L', &[0; 8]),
        (b'l', &[0; 8]),
        (b'f', &[0; 4]),
        (b'd', &[0; 8]),
        (b'D', &[0; 5]),
        (b'S', &[0, 0, 0, 3, 0xff, 0, 1]),
        (b'x', &[0, 0, 0, 2, 0xff, 0]),
        (b'A', &[0, 0, 0, 8, b'V', b't', 0, b'F', 0, 0, 0, 0]),
        (
            b'F',
            &[0, 0, 0, 11, 1, b'a', b'F', 0, 0, 0, 4, 2, 0xc3, 0xa9, b'V'],
        ),
        (b'T', &[0; 8]),
        (b'V', &[]),
    ] {
        headers.extend([2, b'h', kind, kind]);
        headers.extend(value);
    }
    let text = [3, b'a', 0xc3, 0xa9];
    let length = u32::try_from(headers.len()).unwrap().to_be_bytes();
    [
        &FIXED[..],
        &[0xff, 0xfc],
        &text,
        &text,
        &length,
        &headers,
        &[2, 5],
        &text,
        &text,
        &text,
        &text,
        &[0; 8],
        &text,
        &text,
        &text,
        &text,
    ]
    .concat()
}

#[test]
fn an_edited_content_header_reaches_lapin_in_a_form_that_it_parses() {
    bolero::check!()
        .with_type::<(Vec<Edit>, Vec<u8>)>()
        .for_each(|(edits, pieces)| check(&edited(&rich(), edits), pieces));
}

#[test]
fn any_bytes_are_handed_on_or_held_without_a_panic() {
    bolero::check!()
        .with_type::<(Vec<u8>, Vec<u8>)>()
        .for_each(|(sent, pieces)| {
            passed(&mut Frames::new(FRAME_MAX), sent, pieces);
            let behind = [delivery(1, &rich()), sent.clone()].concat();
            passed(&mut Frames::new(4096), &behind, pieces);
        });
}
