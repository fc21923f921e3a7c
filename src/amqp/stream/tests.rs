//! What the broker may send, in whatever pieces it arrives.

use lapin::BasicProperties;
use lapin::protocol::basic::parse_properties;
use lapin::protocol::connection::{AMQPMethod, Start};
use lapin::types::{AMQPValue, FieldTable};
use proptest::prelude::*;

use super::content_header::{MAX_DEPTH, is_in_order, rewrite};
use super::frames::Frames;
use super::*;

const LIMIT: usize = 131_072;
const CHANNEL: u16 = 3;

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    let head = [&[kind][..], &CHANNEL.to_be_bytes(), &length.to_be_bytes()].concat();
    [&head, payload, &[0xCE]].concat()
}

fn short(text: &[u8]) -> Vec<u8> {
    [&[u8::try_from(text.len()).unwrap()][..], text].concat()
}

fn long(kind: u8, bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap();
    [&[kind][..], &length.to_be_bytes(), bytes].concat()
}

fn deliver(tag: u64, routing_key: &[u8]) -> Vec<u8> {
    let method = [
        &[0, 60, 0, 60][..],
        &short(b"consumer"),
        &tag.to_be_bytes(),
        &[0],
    ]
    .concat();
    frame(
        1,
        &[&method, &short(b"exchange"), &short(routing_key)[..]].concat(),
    )
}

/// A content header: the flags of its properties, and those.
fn header(flags: u16, properties: &[u8]) -> Vec<u8> {
    let fixed = [0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];
    [&fixed, &flags.to_be_bytes()[..], properties].concat()
}

const HEADERS: u16 = 1 << 13;
const MESSAGE_ID: u16 = 1 << 7;
const TYPE: u16 = 1 << 5;

fn with_headers(entries: &[u8]) -> Vec<u8> {
    let table = long(b'F', entries);
    header(HEADERS | TYPE, &[&table[1..], &short(b"greet")].concat())
}

fn nested(kind: u8, depth: usize) -> Vec<u8> {
    (0..depth).fold(long(kind, b""), |inside, _| match kind {
        b'F' => long(kind, &[short(b"n"), inside].concat()),
        _ => long(kind, &inside),
    })
}

/// What lapin makes of the payload of a content header.
fn parsed(payload: &[u8]) -> Option<BasicProperties> {
    let (rest, properties) = parse_properties(payload.get(12..)?).ok()?;
    rest.is_empty().then_some(properties)
}

fn rewritten(payload: &[u8]) -> (BasicProperties, String, bool) {
    assert!(!is_in_order(payload, LIMIT));
    let rewritten = rewrite(payload, LIMIT);
    assert!(is_in_order(&rewritten.payload, LIMIT), "{rewritten:?}");
    let properties = parsed(&rewritten.payload).unwrap();
    (properties, rewritten.problem, rewritten.is_unreadable)
}

fn text(properties: &BasicProperties, name: &str) -> AMQPValue {
    let headers = properties.headers().as_ref().unwrap();
    headers.inner()[name].clone()
}

#[test]
fn an_invalid_byte_of_any_string_is_replaced_by_itself() {
    // All of them but the headers and what has a fixed length, each in its turn.
    for bit in [15, 14, 10, 9, 8, 7, 5, 4, 3, 2] {
        let payload = header(1 << bit, &short(b"a\xff\xc3\xa9\xe2\x82b"));
        let (_, problem, is_unreadable) = rewritten(&payload);
        assert!(problem.contains("is not UTF-8"), "{problem}");
        assert_eq!(is_unreadable, bit == 5);
    }
    let (properties, problem, _) =
        rewritten(&header(MESSAGE_ID, &short(b"a\xff\xc3\xa9\xe2\x82b")));
    assert_eq!(properties.message_id().as_ref().unwrap().as_str(), "a?é??b");
    assert_eq!(problem, "the property \"message_id\" is not UTF-8");
}

#[test]
fn a_header_with_a_name_that_is_not_utf_8_stays_under_a_near_name() {
    let entries = [short(b"n\xfe"), long(b'S', b"v\xff")].concat();
    let (properties, problem, is_unreadable) = rewritten(&with_headers(&entries));
    assert_eq!(
        text(&properties, "n?"),
        AMQPValue::LongString(b"v\xff"[..].into())
    );
    assert_eq!(problem, "the name of the header \"n?\" is not UTF-8");
    assert_eq!(properties.kind().as_ref().unwrap().as_str(), "greet");
    assert!(!is_unreadable);
}

#[test]
fn what_is_nested_too_deep_becomes_bytes_from_there_on() {
    for kind in [b'F', b'A'] {
        let name = short(b"deep");
        let fits = with_headers(&[name.clone(), nested(kind, MAX_DEPTH - 1)].concat());
        assert!(is_in_order(&fits, LIMIT) && parsed(&fits).is_some());
        for depth in [MAX_DEPTH, 100, 2_000, 18_000] {
            let entries = [
                name.clone(),
                nested(kind, depth),
                short(b"next"),
                b"t\x01".to_vec(),
            ];
            let (properties, problem, is_unreadable) = rewritten(&with_headers(&entries.concat()));
            assert!(problem.contains("\"deep\" is nested deeper"), "{problem}");
            assert_eq!(text(&properties, "next"), AMQPValue::Boolean(true));
            assert!(!is_unreadable);
        }
    }
}

#[test]
fn a_table_that_cannot_be_read_becomes_bytes_and_its_neighbours_stay() {
    for inside in [
        &b"\x01aZ"[..],
        b"\x09a",
        b"\x01aS\xff\xff\xff\xff",
        b"\x01\xffS\0\0\0\x09",
    ] {
        let entries = [
            short(b"bad"),
            long(b'F', inside),
            short(b"next"),
            b"t\x01".to_vec(),
        ];
        let (properties, problem, _) = rewritten(&with_headers(&entries.concat()));
        assert_eq!(
            text(&properties, "bad"),
            AMQPValue::ByteArray(inside.to_vec().into())
        );
        assert_eq!(text(&properties, "next"), AMQPValue::Boolean(true));
        assert!(problem.contains("\"bad\""), "{problem}");
    }
}

#[test]
fn what_comes_behind_something_unreadable_is_left_out_and_said_so() {
    let entries = [short(b"good"), b"t\x01".to_vec(), b"\x01aZ".to_vec()].concat();
    let (properties, problem, is_unreadable) = rewritten(&with_headers(&entries));
    assert_eq!(properties.headers().as_ref().unwrap().inner().len(), 1);
    assert_eq!(properties.kind().as_ref().unwrap().as_str(), "greet");
    assert!(
        is_unreadable && problem.contains("behind the first 1"),
        "{problem}"
    );

    let (properties, problem, is_unreadable) = rewritten(&header(MESSAGE_ID | TYPE, b"\x01a\x09b"));
    assert_eq!(properties.message_id().as_ref().unwrap().as_str(), "a");
    assert!(properties.kind().is_none() && is_unreadable);
    assert!(problem.contains("from \"type\" on"), "{problem}");
}

#[test]
fn headers_that_do_not_fit_into_a_frame_are_left_out_largest_first_and_ours_last() {
    let entries = [
        [short(b"tierline-history"), long(b'S', &[b'h'; 60_000])].concat(),
        [short(b"small"), long(b'S', b"s")].concat(),
        [short(b"middle"), long(b'S', &[b'm'; 50_000])].concat(),
        [short(b"large"), long(b'S', &[b'l'; 51_000])].concat(),
    ];
    let (properties, problem, is_unreadable) = rewritten(&with_headers(&entries.concat()));
    let headers = properties.headers().as_ref().unwrap().inner();
    let names: Vec<_> = headers.keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["middle", "small", "tierline-history"]);
    assert!(
        problem.ends_with("left out: \"large\"") && !is_unreadable,
        "{problem}"
    );
}

/// What lapin reads when the broker sends `sent` in pieces of these sizes.
fn passed(frames: &mut Frames, sent: &[u8], sizes: impl IntoIterator<Item = usize>) -> Vec<u8> {
    let mut sizes = sizes.into_iter();
    let (mut rest, mut read) = (sent, Vec::new());
    let mut out = vec![0; 50_000];
    while !rest.is_empty() {
        let room = frames.room();
        let size = sizes
            .next()
            .unwrap_or(usize::MAX)
            .clamp(1, rest.len())
            .min(room.len());
        room[..size].copy_from_slice(&rest[..size]);
        frames.fill(size);
        rest = &rest[size..];
        loop {
            match frames.hand_out(&mut out) {
                0 => break,
                length => read.extend_from_slice(&out[..length]),
            }
        }
    }
    read
}

/// What a connection knows after these frames.
fn noted(frames: &mut Frames) -> Opening {
    let opening = Opening::default();
    frames
        .take_notes()
        .into_iter()
        .for_each(|note| opening.note(note));
    opening
}

fn frames() -> Frames {
    Frames::new(u32::try_from(LIMIT).unwrap())
}

#[test]
fn what_is_in_order_passes_unchanged_in_whatever_pieces_it_arrives() {
    let sent = [
        deliver(1, b"critical"),
        frame(2, &with_headers(&[short(b"n"), long(b'S', b"v")].concat())),
        frame(3, &[7; 200_000]),
        frame(8, b""),
        deliver(2, b"critical"),
        frame(
            2,
            &with_headers(&[short(b"n"), long(b'S', &[b'v'; 120_000])].concat()),
        ),
        frame(3, b"hello"),
    ]
    .concat()
    .repeat(3);
    for size in [1, 6, 7, 8, 1_000, usize::MAX] {
        let read = passed(&mut frames(), &sent, std::iter::repeat(size));
        assert!(read == sent, "pieces of {size}");
    }
}

#[test]
fn the_original_is_kept_for_its_delivery_and_what_follows_is_untouched() {
    let bad = header(TYPE, &short(b"gre\xffet"));
    let good = [
        deliver(10, b"critical"),
        frame(2, &with_headers(b"")),
        frame(3, b"x"),
    ]
    .concat();
    let sent = [
        deliver(9, b"critical"),
        frame(2, &bad),
        frame(3, b"hello"),
        good.clone(),
    ]
    .concat();
    for size in [1, 7, usize::MAX] {
        let mut frames = Frames::new(0);
        let read = passed(&mut frames, &sent, std::iter::repeat(size));
        assert!(read.ends_with(&good));
        let repairs = noted(&mut frames).repairs;
        let repaired = repairs.take(CHANNEL, 9).unwrap();
        assert_eq!(repaired.original, bad[12..]);
        assert!(repaired.is_unreadable);
        assert_eq!(repairs.take(CHANNEL, 10), None);
    }
}

#[test]
fn a_header_frame_above_every_limit_costs_only_its_message() {
    for size in [200_000, (1 << 20) - 30, 1 << 20, 5 << 20] {
        let bad = with_headers(&[short(b"n"), long(b'S', &vec![b'v'; size])].concat());
        let good = [
            frame(3, b"x"),
            deliver(2, b"critical"),
            frame(2, &with_headers(b"")),
        ]
        .concat();
        let sent = [deliver(1, b"critical"), frame(2, &bad), good.clone()].concat();
        let mut frames = frames();
        let read = passed(&mut frames, &sent, std::iter::repeat(70_000));
        assert!(read.ends_with(&good) && read.len() < LIMIT);
        let repaired = noted(&mut frames).repairs.take(CHANNEL, 1).unwrap();
        assert!(repaired.original.len() <= 1 << 20, "{}", repaired.problem);
    }
}

#[test]
fn the_limit_is_the_smaller_one_of_both_sides() {
    let tune = |limit: u32| {
        let arguments = [&[0, 0][..], &limit.to_be_bytes(), &[0, 10]].concat();
        frame(1, &[&[0, 10, 0, 30], &arguments[..]].concat())
    };
    let large = frame(
        2,
        &with_headers(&[short(b"n"), long(b'S', &[b'v'; 9_000])].concat()),
    );
    for (ours, theirs, is_cut) in [(8_192, 0, true), (0, 8_192, true), (131_072, 8_192, true)]
        .into_iter()
        .chain([
            (8_192, 131_072, true),
            (0, 0, false),
            (131_072, 131_072, false),
        ])
    {
        let mut frames = Frames::new(ours);
        let sent = [tune(theirs), large.clone()].concat();
        let read = passed(&mut frames, &sent, None);
        assert_eq!(read != sent, is_cut, "{ours} and {theirs}");
    }
}

#[test]
fn a_routing_key_that_is_not_utf_8_does_no_harm() {
    let sent = deliver(1, b"0.1.\xff");
    let read = passed(&mut frames(), &sent, None);
    assert_eq!(read, deliver(1, b"0.1.?"));
}

#[test]
fn the_broker_s_version_is_read() {
    let mut server_properties = FieldTable::default();
    server_properties.insert("version".into(), AMQPValue::LongString("4.3.6".into()));
    let start = Start {
        version_major: 0,
        version_minor: 9,
        server_properties,
        mechanisms: "PLAIN".into(),
        locales: "en_US".into(),
    };
    let class = AMQPClass::Connection(AMQPMethod::Start(start));
    let write = lapin::protocol::gen_class(&class);
    let payload = write(Vec::new().into()).unwrap().into_inner().0;
    let mut frames = frames();
    passed(&mut frames, &frame(1, &payload), std::iter::repeat(5));
    assert_eq!(Opening::default().version(), None);
    let opening = noted(&mut frames);
    assert_eq!(opening.version().as_deref(), Some("4.3.6"));
}

#[test]
fn what_is_no_amqp_is_left_to_lapin_and_not_held() {
    for sent in [
        &b"HTTP/1.1 400 Bad Request\r\n"[..],
        b"AMQP\x00\x00\x09\x01",
        &[0; 50_000],
    ] {
        assert_eq!(passed(&mut frames(), sent, None), sent);
    }
}

proptest! {
    #[test]
    fn any_properties_are_parsed_by_lapin_after_the_check(
        flags in any::<u16>(),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let payload = header(flags, &bytes);
        prop_assert_eq!(is_in_order(&payload, LIMIT), parsed(&payload).is_some());
        let rewritten = rewrite(&payload, LIMIT).payload;
        prop_assert!(is_in_order(&rewritten, LIMIT) && parsed(&rewritten).is_some());
        prop_assert_eq!(&rewritten[..12], &payload[..12]);
    }

    #[test]
    fn what_is_in_order_is_rewritten_as_it_is(
        names in prop::collection::vec("[a-zé]{0,9}", 0..5),
        value in prop::collection::vec(any::<u8>(), 0..50),
    ) {
        let entries: Vec<u8> = names
            .iter()
            .flat_map(|name| [short(name.as_bytes()), long(b'S', &value)].concat())
            .collect();
        let payload = with_headers(&entries);
        prop_assert!(is_in_order(&payload, LIMIT));
        prop_assert_eq!(rewrite(&payload, LIMIT).payload, payload);
    }

    #[test]
    fn any_bytes_in_any_pieces_are_handed_on_or_held(
        sent in prop::collection::vec(any::<u8>(), 0..2_000),
        sizes in prop::collection::vec(1_usize..300, 0..50),
    ) {
        let mut frames = frames();
        let read = passed(&mut frames, &sent, sizes);
        prop_assert!(read.len() <= sent.len() + 64);
    }
}
