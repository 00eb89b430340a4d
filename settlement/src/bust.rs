//! Stored form of a `Bust` command: the data that both sessions receive for a refused trade. It is
//! stored with the batch because ended orders are in no table.
//!
//! Little-endian, [`LEN`] bytes: trade id, trade number, instrument, then session, order and client
//! order id of the buyer and of the seller.

use types::command::{Bust, TradeParty};
use types::{Handle, Id128, InstrumentIx, SessionIx};

/// Bytes per command.
pub const LEN: usize = 16 + 8 + 4 + 2 * PARTY_LEN;
const PARTY_LEN: usize = 4 + 8 + 8;

/// Appends a command.
pub fn append(bust: &Bust, out: &mut Vec<u8>) {
    out.extend(bust.trade.as_u128().to_le_bytes());
    out.extend(bust.trade_number.to_le_bytes());
    out.extend(bust.instrument.0.to_le_bytes());
    for party in [&bust.buy, &bust.sell] {
        out.extend(party.session.0.to_le_bytes());
        out.extend(party.handle.engine_id().to_le_bytes());
        out.extend(party.client_order_id.to_le_bytes());
    }
}

/// Decodes the output of [`append`]; `None` for other bytes.
pub fn read_all(bytes: &[u8]) -> Option<Vec<Bust>> {
    let (commands, rest) = bytes.as_chunks::<LEN>();
    rest.is_empty()
        .then(|| commands.iter().map(|bytes| read(bytes)).collect())?
}

fn read(mut bytes: &[u8]) -> Option<Bust> {
    let bytes = &mut bytes;
    Some(Bust {
        trade: Id128::from_u128(u128::from_le_bytes(read_array(bytes)?)),
        trade_number: u64::from_le_bytes(read_array(bytes)?),
        instrument: InstrumentIx(u32::from_le_bytes(read_array(bytes)?)),
        buy: read_party(bytes)?,
        sell: read_party(bytes)?,
    })
}

fn read_party(bytes: &mut &[u8]) -> Option<TradeParty> {
    Some(TradeParty {
        session: SessionIx(u32::from_le_bytes(read_array(bytes)?)),
        handle: Handle::from_engine_id(u64::from_le_bytes(read_array(bytes)?)),
        client_order_id: u64::from_le_bytes(read_array(bytes)?),
    })
}

fn read_array<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bust_commands_round_trip() {
        let bust = |n: u64| Bust {
            trade: Id128::from_u128(u128::MAX / u128::from(n)),
            trade_number: n,
            instrument: InstrumentIx(3),
            buy: TradeParty {
                session: SessionIx(9),
                handle: Handle {
                    slot: 7,
                    generation: 2,
                },
                client_order_id: u64::MAX - n,
            },
            sell: TradeParty::NONE,
        };
        let mut bytes = Vec::new();
        for n in 1..=3 {
            append(&bust(n), &mut bytes);
        }
        assert_eq!(bytes.len(), 3 * LEN);
        let expected = (1..=3).map(bust).collect();
        assert_eq!(read_all(&bytes), Some(expected));
        assert_eq!(read_all(&bytes[1..]), None);
        assert_eq!(read_all(&[]), Some(Vec::new()));
    }
}
