use bytes::{BufMut, BytesMut};
use rand::{Rng, SeedableRng, rngs::StdRng};
use types::{CancelReason, Id128, OrderType, RejectReason, Side, StpMode, TimeInForce};

use super::frame::Message;
use super::*;

fn order() -> NewOrder {
    NewOrder {
        client_order_id: 0x0102_0304_0506_0708,
        instrument: 3,
        side: Side::Sell,
        order_type: OrderType::Limit,
        time_in_force: TimeInForce::Ioc,
        stp: StpMode::CancelOldest,
        flags: ORDER_POST_ONLY,
        price_ticks: -2,
        quantity_lots: 7,
        expire_at_ns: 0,
    }
}

fn bytes_of(message: impl Into<ClientMessage>, sequence: u64) -> BytesMut {
    let mut out = BytesMut::new();
    encode(&message.into(), 5, sequence, &mut out);
    out
}

#[test]
fn golden_bytes_of_an_order() {
    let expected = "37001003\
                    0500\
                    0900000000000000\
                    0807060504030201\
                    03000000\
                    01000101\
                    01\
                    feffffffffffffff\
                    0700000000000000\
                    0000000000000000";
    assert_eq!(hex::encode(bytes_of(order(), 9)), expected);
}

#[test]
fn a_stream_is_cut_into_the_messages_that_were_written() {
    let mut stream = bytes_of(order(), 1);
    stream.extend(bytes_of(Heartbeat {}, 0));
    stream.extend(bytes_of(
        Cancel {
            client_order_id: 5,
            engine_order_id: 0,
        },
        2,
    ));
    let mut buffer = BytesMut::new();
    let mut seen = Vec::new();
    for byte in stream {
        buffer.put_u8(byte);
        while let Some((header, message)) = decode::<ClientMessage>(&mut buffer).unwrap() {
            seen.push((header.sequence, message));
        }
    }
    assert_eq!(seen.len(), 3);
    assert_eq!(seen[0], (1, order().into()));
    assert_eq!(seen[1].1, Heartbeat {}.into());
    assert_eq!(seen[2].0, 2);
}

#[test]
fn server_messages_round_trip() {
    let id = Id128::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0001);
    let messages: Vec<ServerMessage> = vec![
        Cancelled {
            client_seq: 4,
            client_order_id: 5,
            engine_order_id: 6,
            instrument: 1,
            reason: CancelReason::SelfTrade,
            quantity_lots: 9,
            node_sequence: 10,
            time_ns: 11,
            received_ns: 5,
        }
        .into(),
        Rejected {
            client_seq: 4,
            client_order_id: 5,
            engine_order_id: 0,
            request: types::command::RequestKind::Amend,
            reason: RejectReason::OrderNotOpen,
            limit: 7,
            node_sequence: 8,
            time_ns: 9,
            received_ns: 5,
        }
        .into(),
        TradingHold {
            request_id: 1,
            asset: 0,
            hold_id: id,
            undrawn_minor: 5,
            drawn_minor: 0,
            outcome: 255,
            limit: 0,
        }
        .into(),
        Disconnect {
            code: 1,
            text: Text::truncated("рубль"),
        }
        .into(),
    ];
    for message in messages {
        let mut out = BytesMut::new();
        encode(&message, 3, 77, &mut out);
        let (header, read) = decode::<ServerMessage>(&mut out).unwrap().unwrap();
        assert_eq!((header.channel, header.sequence, read), (3, 77, message));
        assert!(out.is_empty());
    }
}

#[test]
fn invalid_bytes_return_the_matching_error() {
    let good = bytes_of(order(), 1);
    let broken = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        decode::<ClientMessage>(&mut bytes).unwrap_err()
    };
    assert_eq!(broken(3, 1), WireError::Version { version: 1 });
    assert_eq!(broken(2, 0x77), WireError::Type { kind: 0x77 });
    assert_eq!(broken(2, 0x91), WireError::Type { kind: 0x91 });
    assert_eq!(
        broken(0, 54),
        WireError::Length {
            kind: 0x10,
            length: 54
        }
    );
    assert_eq!(
        broken(HEADER_LEN + 12, 9),
        WireError::Field {
            kind: 0x10,
            field: "side"
        }
    );
}

#[test]
fn garbage_never_panics_and_never_waits_for_more_than_one_message() {
    let mut rng = StdRng::seed_from_u64(11);
    for _ in 0..20_000 {
        let length = rng.random_range(0..200);
        let mut bytes = BytesMut::new();
        bytes.extend((0..length).map(|_| rng.random::<u8>()));
        // Half of the messages have a valid header and a garbage body.
        if rng.random_bool(0.5) && length >= HEADER_LEN {
            let layout = &ClientMessage::LAYOUTS[rng.random_range(0..ClientMessage::LAYOUTS.len())];
            let body = ClientMessage::body_len(layout.kind).unwrap();
            bytes[..2].copy_from_slice(&((HEADER_LEN + body) as u16).to_le_bytes());
            bytes[2] = layout.kind;
            bytes[3] = VERSION;
        }
        while let Ok(Some(_)) = decode::<ClientMessage>(&mut bytes) {}
    }
}

#[test]
fn disconnect_codes_are_dense() {
    for (index, code) in DisconnectCode::ALL.iter().enumerate() {
        assert_eq!(usize::from(code.code()), index);
        assert_eq!(DisconnectCode::from_code(code.code()), Some(*code));
    }
}

/// Every field has a meaning that fits a cell of a table.
#[test]
fn every_field_has_a_meaning() {
    let layouts = ClientMessage::LAYOUTS.iter().chain(ServerMessage::LAYOUTS);
    for layout in layouts {
        for row in (layout.rows)() {
            let (name, meaning) = (layout.name, row.meaning.trim());
            assert!(meaning.ends_with('.'), "{name}.{}: {meaning}", row.field);
            assert!(!meaning.contains('|'), "{name}.{}: {meaning}", row.field);
        }
    }
}

fn table(layout: &Layout) -> String {
    let rows = (layout.rows)();
    let length = HEADER_LEN + rows.iter().map(|row| row.len).sum::<usize>();
    let mut out = format!(
        "#### `{:#04x}` {} ({length} bytes)\n\n{}\n",
        layout.kind,
        layout.name,
        layout.about.trim()
    );
    if !rows.is_empty() {
        out.push_str("\n| offset | length | field | kind | meaning |\n|---:|---:|---|---|---|\n");
        for row in rows {
            let LayoutRow {
                field,
                offset,
                len,
                kind,
                meaning,
            } = row;
            let (at, meaning) = (HEADER_LEN + offset, meaning.trim());
            out.push_str(&format!(
                "| {at} | {len} | `{field}` | {kind} | {meaning} |\n"
            ));
        }
    }
    out
}

/// The tables of `docs/protocol.md` equal the code; that of reject reasons is the client's.
/// `PROTOCOL_DOC=write cargo test -p wire -p client protocol_document` writes them.
#[test]
fn protocol_document_is_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/protocol.md");
    let document = std::fs::read_to_string(path).unwrap();
    let mut expected = document.clone();
    for (mark, layouts) in [
        ("client", ClientMessage::LAYOUTS),
        ("server", ServerMessage::LAYOUTS),
    ] {
        let tables: Vec<_> = layouts.iter().map(table).collect();
        expected = between(&expected, mark, &tables.join("\n"));
    }
    let codes = |names: &mut dyn Iterator<Item = (u16, String)>, head: &str| {
        names.fold(
            format!("| code | {head} |\n|---:|---|\n"),
            |out, (code, name)| out + &format!("| {code} | {name} |\n"),
        )
    };
    expected = between(
        &expected,
        "disconnect",
        &codes(
            &mut DisconnectCode::ALL
                .iter()
                .map(|code| (code.code(), code.to_string())),
            "meaning",
        ),
    );
    expected = between(
        &expected,
        "cancels",
        &codes(
            &mut CancelReason::ALL
                .iter()
                .map(|code| (u16::from(code.code()), format!("`{code}`"))),
            "reason",
        ),
    );
    if std::env::var("PROTOCOL_DOC").is_ok_and(|value| value == "write") {
        std::fs::write(path, &expected).unwrap();
    } else {
        assert!(
            document == expected,
            "docs/protocol.md differs from the code: run PROTOCOL_DOC=write cargo test -p wire protocol_document"
        );
    }
}

fn between(document: &str, mark: &str, content: &str) -> String {
    let (start, end) = (format!("<!-- {mark} -->\n"), format!("<!-- /{mark} -->"));
    let (head, rest) = document.split_once(&start).expect("opening mark");
    let (_, tail) = rest.split_once(&end).expect("closing mark");
    format!("{head}{start}\n{}\n\n{end}{tail}", content.trim_end())
}
