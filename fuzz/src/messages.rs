//! The binary trading protocol in both directions.

use bytes::BytesMut;
use wire::{
    ClientMessage, HEADER_LEN, Header, MESSAGE_LEN_MAX, ServerMessage, WireError, append, decode,
    parse, peek, set_channel,
};

use crate::Random;

/// Check and seeds of one direction. A macro, because the trait of the messages is private to
/// `wire`.
macro_rules! direction {
    ($set:ident, $check:ident, $seeds:ident) => {
        /// Decodes any bytes as a stream of messages.
        pub fn $check(bytes: &[u8]) {
            let mut at = 0;
            let (whole, error) = read_all(|| {
                let rest = &bytes[at..];
                let head = peek::<$set>(rest)?;
                let Some((header, message)) = parse::<$set>(rest)? else {
                    return Ok(None);
                };
                assert_eq!(head, Some(header), "peek and parse agree on the header");
                let length = usize::from(header.length);
                assert!((HEADER_LEN..=MESSAGE_LEN_MAX).contains(&length));
                let mut again = Vec::new();
                append(&message, header.channel, header.sequence, &mut again);
                assert_eq!(again, rest[..length], "{message:?}");
                // `set_channel` changes only the channel.
                set_channel(&mut again, !header.channel);
                let other = parse::<$set>(&again)
                    .expect("still a message")
                    .expect("whole");
                let channel = !header.channel;
                assert_eq!(other, (Header { channel, ..header }, message));
                at += length;
                Ok(Some((header, message)))
            });
            // The same stream in pieces.
            let size = 1 + usize::from(bytes.first().copied().unwrap_or(0) % 61);
            let (mut buffer, mut pieces) = (BytesMut::new(), bytes.chunks(size));
            let (cut, cut_error) = read_all(|| {
                loop {
                    match (decode::<$set>(&mut buffer)?, pieces.clone().next()) {
                        (Some(found), _) => return Ok(Some(found)),
                        (None, Some(piece)) => {
                            assert!(buffer.len() < MESSAGE_LEN_MAX, "the buffer is bounded");
                            buffer.extend_from_slice(piece);
                            pieces.next();
                        }
                        (None, None) => return Ok(None),
                    }
                }
            });
            assert_eq!((whole, error), (cut, cut_error));
        }

        /// Messages of each type, with bodies of zeros, of ones and of random bytes, and a stream
        /// of all types.
        pub fn $seeds() -> Vec<Vec<u8>> {
            let mut random = Random(1);
            let mut seeds = Vec::new();
            for layout in $set::LAYOUTS {
                let rows = (layout.rows)();
                let length: usize = rows.iter().map(|row| row.len).sum();
                for body in [vec![0; length], vec![1; length], random.bytes(length)] {
                    seeds.push(stream(layout.kind, &body));
                }
            }
            seeds.push(seeds.iter().step_by(3).flatten().copied().collect());
            seeds
        }
    };
}

direction!(ClientMessage, check_client, client_seeds);
direction!(ServerMessage, check_server, server_seeds);

/// The messages before the end of the stream or before the first error, and that error.
fn read_all<M>(
    mut next: impl FnMut() -> Result<Option<(Header, M)>, WireError>,
) -> (Vec<(Header, M)>, Option<WireError>) {
    let mut found = Vec::new();
    loop {
        match next() {
            Ok(Some(message)) => found.push(message),
            Ok(None) => return (found, None),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                return (found, Some(error));
            }
        }
    }
}

fn stream(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&((HEADER_LEN + body.len()) as u16).to_le_bytes());
    out.extend_from_slice(&[kind, wire::VERSION, 3, 0]);
    out.extend_from_slice(&7_u64.to_le_bytes());
    out.extend_from_slice(body);
    out
}
