//! Ids that are pure functions of other ids and names.
//!
//! The same input gives the same id, so a replay or a repeated call finds the rows that it wrote
//! before (R180, T05, `design.md` 2 and 4).
//!
//! | id | derived from |
//! |---|---|
//! | order, trade | time, node and sequence of the command |
//! | child: hold of an order, operation of a trade | its parent and a name |
//! | key hash, session key, hold opened by a call | user and key, under one namespace |
//! | source and batch of settlement | node and sequences |
//! | redemption and its hold, operation of a holder | names of the CFA service |
//! | hold of an offer, hold of a freeze | name of the CFA service |
//! | operation of an allotment | its offer |

use alloc::format;
use alloc::string::{String, ToString};

use uuid::Uuid;

use crate::{Id128, NodeId, Sequence};

/// Maximum of derived ids per command.
pub const DERIVED_PER_COMMAND_MAX: u32 = 1 << 24;

/// UUIDv7-shaped id of object `n` of command `sequence` at `time_ns`.
///
/// Layout: 48 bits milliseconds, version, 12 bits of the millisecond's fraction, variant, 6 bits
/// node, 32 low bits of the sequence, 24 bits n. Unique as long as a node makes fewer than 2^32
/// commands per millisecond; sorts by time.
const fn derived_uuid(time_ns: u64, node: NodeId, sequence: Sequence, n: u32) -> Id128 {
    assert!(n < DERIVED_PER_COMMAND_MAX);
    let millis = (time_ns / 1_000_000) & 0xffff_ffff_ffff;
    let fraction = (time_ns % 1_000_000) * 4096 / 1_000_000;
    let high = (millis << 16) | (7 << 12) | fraction;
    let low =
        (0b10 << 62) | ((node.get() as u64) << 56) | ((sequence.0 & 0xffff_ffff) << 24) | n as u64;
    Id128::from_u128(((high as u128) << 64) | low as u128)
}

/// Public id of the order that command `sequence` entered.
pub const fn order_uuid(time_ns: u64, node: NodeId, sequence: Sequence) -> Id128 {
    derived_uuid(time_ns, node, sequence, 0)
}

/// Public trade id of the trade reported as event `index` of command `sequence`.
pub const fn trade_uuid(time_ns: u64, node: NodeId, sequence: Sequence, index: u32) -> Id128 {
    derived_uuid(time_ns, node, sequence, index + 1)
}

/// Fields read from an order or trade id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DerivedFrom {
    /// Latest command time, in nanoseconds, that gives this id. The earliest is less than 245 ns
    /// before.
    pub latest_ns: u64,
    /// The 32 low bits of the sequence.
    pub sequence_low: u32,
    /// Index of the trade among the command's events; `None` for an order.
    pub index: Option<u32>,
}

/// Parses an id of [`order_uuid`] or [`trade_uuid`]; `None` when it is not of this node.
///
/// Not every such id was assigned: the caller finds the command, derives the id again and compares.
pub const fn derived_from(id: Id128, node: NodeId) -> Option<DerivedFrom> {
    let (high, low) = id.halves();
    if (high >> 12) & 0xf != 7 || low >> 56 != (0b10 << 6) | node.get() as u64 {
        return None;
    }
    // Times end in 2554; the caller's input may contain any other.
    let Some(whole_ns) = (high >> 16).checked_mul(1_000_000) else {
        return None;
    };
    let next = ((high & 0xfff) + 1) * 1_000_000;
    let Some(latest_ns) = whole_ns.checked_add(next.div_ceil(4096) - 1) else {
        return None;
    };
    Some(DerivedFrom {
        latest_ns,
        sequence_low: (low >> 24) as u32,
        index: trade_index(id),
    })
}

/// Index of a trade among its command's events; `None` for an order id.
pub const fn trade_index(trade: Id128) -> Option<u32> {
    let (_, low) = trade.halves();
    ((low & (DERIVED_PER_COMMAND_MAX as u64 - 1)) as u32).checked_sub(1)
}

/// UUIDv8 of `name` under a time-ordered `parent` (`design.md` 4): the first 48 bits are the
/// parent's milliseconds, the rest is the SHA-1 of (parent, name), so an id is repeatable.
///
/// The rows of one batch are neighbours in every index keyed by such ids, so the cost of an insert
/// does not grow with the table.
#[must_use]
pub fn child_uuid(parent: Id128, name: &str) -> Id128 {
    const TIME: u128 = u128::MAX << 80;
    const VERSION: u128 = 0xf << 76;
    let parent = parent.as_u128();
    let hash = Uuid::new_v5(&Uuid::from_u128(parent), name.as_bytes()).as_u128();
    Id128::from_u128((parent & TIME) | (hash & !TIME & !VERSION) | (8 << 76))
}

/// One of an order's two holds in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HoldPart {
    /// Value of the order: roubles of a buy, units of a sell.
    Main,
    /// Future fees.
    Fee,
}

impl HoldPart {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Fee => "fee",
        }
    }
}

/// Ledger hold for one part of an order.
pub fn order_hold(order: Id128, part: HoldPart) -> Id128 {
    child_uuid(order, part.as_str())
}

/// Namespace of ids derived from texts.
const NAMESPACE: Uuid = Uuid::from_u128(0x8d0e_4c1b_52a7_5e6f_a3d4_91b6_0c7f_2e10);

/// Ends each part of a name. No id contains it, so two lists of parts never form the same name.
const SEPARATOR: char = '\u{1f}';

fn name_uuid(parts: &[&str]) -> Id128 {
    let mut name = String::new();
    for part in parts {
        name.push_str(part);
        name.push(SEPARATOR);
    }
    Id128::from_u128(Uuid::new_v5(&NAMESPACE, name.as_bytes()).as_u128())
}

/// Hash of (call, user, idempotency key), journalled with a call (`design.md` 2).
pub fn key_hash(call: &str, user_id: &str, idempotency_key: &str) -> Id128 {
    name_uuid(&["key", call, user_id, idempotency_key])
}

/// Ledger hold of a single order that a call placed outside a trading hold.
pub fn dedicated_hold(user_id: &str, idempotency_key: &str) -> Id128 {
    name_uuid(&["order hold", user_id, idempotency_key])
}

/// Ledger hold of a trading hold that a call opened.
pub fn trading_hold(user_id: &str, idempotency_key: &str) -> Id128 {
    name_uuid(&["trading hold", user_id, idempotency_key])
}

/// Key of a session of a user.
pub fn session_key(user_id: &str, session_name: &str) -> Id128 {
    name_uuid(&["session", user_id, session_name])
}

/// Numeric client order id of a text; never 0.
///
/// The number itself if the text is its canonical form (`042` is not that of 42), else a hash.
pub fn client_order_number(text: &str) -> u64 {
    match text.parse::<u64>() {
        Ok(number) if number != 0 && number.to_string() == text => number,
        _ => {
            let (high, low) = name_uuid(&["client order", text]).halves();
            (high ^ low).max(1)
        }
    }
}

/// Id derived from a name of the CFA service.
fn cfa_uuid(name: &str) -> Id128 {
    Id128::from_u128(Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes()).as_u128())
}

/// Ledger hold of a CFA-RUB redemption by an operation.
pub fn redemption_hold(operation_id: &str) -> Id128 {
    cfa_uuid(&format!("{operation_id}:hold"))
}

/// Ledger hold of an offer: the payment of a subscription, or the units that a holder offers.
pub fn offer_hold(offer_id: &str) -> Id128 {
    cfa_uuid(&format!("{offer_id}:subscription"))
}

/// Operation that delivers what a placement has allotted to a subscription. Its id sorts by the
/// time of the subscription.
pub fn allotment(offer: Id128) -> Id128 {
    child_uuid(offer, "allotment")
}

/// Ledger hold of the units that an enforcement act freezes.
pub fn enforcement_hold(act_id: &str) -> Id128 {
    cfa_uuid(&format!("{act_id}:freeze"))
}

/// Id of the redemption of an issue.
pub fn issue_redemption(instrument_id: &str) -> Id128 {
    cfa_uuid(&format!("redemption:{instrument_id}"))
}

/// Id of the payment of a coupon, numbered from 1 within its issue.
pub fn coupon(instrument_id: &str, number: u32) -> Id128 {
    cfa_uuid(&format!("coupon:{instrument_id}:{number}"))
}

/// Operation of one holder in one attempt to redeem an issue or to pay a coupon.
pub fn holder_redemption(attempt: &str) -> Id128 {
    cfa_uuid(attempt)
}

/// Source name under which the ledger keeps settlement's position.
pub fn settlement_source(node: NodeId) -> String {
    format!("market:{}", node.get())
}

/// Source of batches that only split holds and cover no new sequence.
pub fn split_source(node: NodeId) -> String {
    format!("market:{}/carve", node.get())
}

/// Source of the parts of one command that is too large for a batch.
pub fn parts_source(node: NodeId, sequence: Sequence) -> String {
    format!("market:{}/{sequence}", node.get())
}

/// Batch id on chain: `<node>:<first>-<last>`.
pub fn batch_id(node: NodeId, first: u64, last: u64) -> String {
    format!("{}:{first}-{last}", node.get())
}

/// Batch id of part `number`, from 1, of one command that is too large for a batch.
pub fn part_batch_id(node: NodeId, sequence: Sequence, number: u64) -> String {
    format!("{}.{number}", batch_id(node, sequence.0, sequence.0))
}

/// Batch id of a batch that only splits holds, numbered from 1.
pub fn split_batch_id(node: NodeId, number: u64) -> String {
    format!("{}:carve-{number}", node.get())
}

/// Batch id of an attempt to settle a batch on chain. The first attempt uses the batch's own id.
pub fn attempt_id(batch_id: &str, attempt: u32) -> String {
    if attempt == 1 {
        batch_id.into()
    } else {
        format!("{batch_id}/{attempt}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R180
    #[test]
    fn derived_ids_have_the_shape_of_uuid_v7_and_differ() {
        let node = NodeId::new(5).unwrap();
        let time_ns = 1_700_000_000_123_456_789;
        let order = order_uuid(time_ns, node, Sequence(77));
        let text = order.to_string();
        assert_eq!(text.len(), 36);
        assert_eq!(text.as_bytes()[14], b'7');
        assert!(matches!(text.as_bytes()[19], b'8' | b'9' | b'a' | b'b'));
        assert_eq!(order.as_u128() >> 80, 1_700_000_000_123);
        assert_eq!(order, order_uuid(time_ns, node, Sequence(77)));
        let trade = trade_uuid(time_ns, node, Sequence(77), 0);
        assert_ne!(order, trade);
        assert_ne!(trade, trade_uuid(time_ns, node, Sequence(77), 1));
        assert_ne!(trade, trade_uuid(time_ns, node, Sequence(78), 0));
        assert!(order < order_uuid(time_ns + 1_000_000, node, Sequence(1)));
    }

    #[test]
    fn an_id_contains_what_it_was_derived_from() {
        let node = NodeId::new(5).unwrap();
        let sequence = Sequence((7 << 32) | 77);
        for fraction in [0, 1, 243, 244, 245, 456_789, 999_755, 999_756, 999_999] {
            let time_ns = 1_700_000_000_123_000_000 + fraction;
            let order = order_uuid(time_ns, node, sequence);
            let from = derived_from(order, node).unwrap();
            assert_eq!((from.sequence_low, from.index), (77, None));
            assert!((time_ns..time_ns + 245).contains(&from.latest_ns));
            assert_eq!(order, order_uuid(from.latest_ns, node, sequence));
            assert!(order < order_uuid(from.latest_ns + 1, node, sequence));
            let trade = derived_from(trade_uuid(time_ns, node, sequence, 9), node).unwrap();
            assert_eq!((trade.sequence_low, trade.index), (77, Some(9)));
            assert_eq!(derived_from(order, NodeId::new(6).unwrap()), None);
            assert_eq!(derived_from(child_uuid(order, "main"), node), None);
        }
        assert_eq!(derived_from(Id128::NONE, node), None);
        for high in [u64::MAX, ((u64::MAX / 1_000_000) << 16) | 0xffff] {
            let high = high & !0xf000 | 0x7000;
            let low = 0x85ff_ffff_ffff_ffffu64;
            let forged = Id128::from_u128(u128::from(high) << 64 | u128::from(low));
            assert_eq!(derived_from(forged, node), None, "time out of range");
        }
    }

    #[test]
    fn a_child_id_keeps_its_parents_milliseconds_and_is_a_uuid_v8() {
        let node = NodeId::new(5).unwrap();
        let at = |ms: u64| order_uuid(ms * 1_000_000, node, Sequence(77));
        let (parent, later) = (at(1_700_000_000_123), at(1_700_000_000_124));
        let child = child_uuid(parent, "main");
        assert_eq!(child.as_u128() >> 80, 1_700_000_000_123);
        let text = child.to_string();
        assert_eq!(text.as_bytes()[14], b'8');
        assert!(matches!(text.as_bytes()[19], b'8' | b'9' | b'a' | b'b'));
        assert_eq!(child, child_uuid(parent, "main"));
        assert_ne!(child, child_uuid(parent, "fee"));
        let sibling = order_uuid(1_700_000_000_123_000_000, node, Sequence(78));
        assert_ne!(child, child_uuid(sibling, "main"));
        for name in ["main", "fee", "TRADE_BUY", "TRADE_SELL", "FEE"] {
            assert!(child_uuid(parent, name) < child_uuid(later, name));
        }
    }

    #[test]
    fn ids_of_texts_keep_calls_users_and_keys_apart() {
        let base = key_hash("PlaceOrder", "u1", "k");
        assert_eq!(base, key_hash("PlaceOrder", "u1", "k"));
        for other in [
            key_hash("CancelOrder", "u1", "k"),
            key_hash("PlaceOrder", "u2", "k"),
            key_hash("PlaceOrder", "u", "1k"),
            dedicated_hold("u1", "k"),
            trading_hold("u1", "k"),
        ] {
            assert_ne!(base, other);
        }
        assert_eq!(client_order_number("42"), 42);
        assert_ne!(client_order_number("0"), 0);
        for other_text in ["042", "+42", "42 "] {
            assert_ne!(client_order_number(other_text), 42, "{other_text}");
        }
        assert_eq!(client_order_number("abc"), client_order_number("abc"));
    }

    /// Databases and journals contain these ids: a change loses all rows under the old ones.
    #[test]
    fn golden_ids() {
        let node = NodeId::new(5).unwrap();
        let order = order_uuid(1_700_000_000_123_456_789, node, Sequence(77));
        for (id, text) in [
            (order, "018bcfe5-687b-774f-8500-00004d000000"),
            (
                order_hold(order, HoldPart::Main),
                "018bcfe5-687b-8d41-97f1-5caf845ea2b5",
            ),
            (
                key_hash("PlaceOrder", "u1", "k"),
                "b23f77e4-2b91-5df5-9ce6-7d51c734c198",
            ),
            (
                dedicated_hold("u1", "k"),
                "6557e59b-9ec8-522d-8c73-7374dd9fadc1",
            ),
            (
                trading_hold("u1", "k"),
                "38001e41-c282-5085-85d9-b927ec2e3004",
            ),
            (
                session_key("u1", "s"),
                "de130481-7e4a-595e-b02d-b6007a33ae9e",
            ),
            (
                redemption_hold("op-1"),
                "1f4ea32a-9e68-5ecb-9246-2e3eb541a023",
            ),
            (offer_hold("s-1"), "13d06d6b-76c8-5693-9cf9-a7d734adc64c"),
            (allotment(order), "018bcfe5-687b-8a06-b845-847df02daa4a"),
            (
                issue_redemption("BOND-1"),
                "b5aff749-76ef-50bf-99ce-063b69fd217d",
            ),
        ] {
            assert_eq!(id.to_string(), text);
        }
        assert_eq!(client_order_number("abc"), 7_250_319_700_282_373_194);
        assert_eq!(settlement_source(node), "market:5");
        assert_eq!(split_source(node), "market:5/carve");
        assert_eq!(parts_source(node, Sequence(77)), "market:5/77");
        assert_eq!(batch_id(node, 1, 9), "5:1-9");
        assert_eq!(part_batch_id(node, Sequence(77), 2), "5:77-77.2");
        assert_eq!(split_batch_id(node, 3), "5:carve-3");
        assert_eq!(attempt_id("5:1-9", 1), "5:1-9");
        assert_eq!(attempt_id("5:1-9", 2), "5:1-9/2");
    }
}
