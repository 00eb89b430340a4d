//! Ids that this room derives, so that a repeated call meets its own traces.

use types::Id128;
use uuid::Uuid;

const NAMESPACE: Uuid = Uuid::from_u128(0x8d0e_4c1b_52a7_5e6f_a3d4_91b6_0c7f_2e10);

/// Separates the parts of a name; no id may hold it.
const SEPARATOR: char = '\u{1f}';

fn derive(parts: &[&str]) -> Id128 {
    let mut name = String::new();
    for part in parts {
        name.push_str(part);
        name.push(SEPARATOR);
    }
    Id128::from_u128(Uuid::new_v5(&NAMESPACE, name.as_bytes()).as_u128())
}

/// Hash of (call, user, idempotency key) that is journalled with a call (`design.md` 2).
pub fn key_hash(call: &str, user_id: &str, idempotency_key: &str) -> Id128 {
    derive(&["key", call, user_id, idempotency_key])
}

/// Ledger hold of an order that has one of its own.
pub fn order_hold(user_id: &str, idempotency_key: &str) -> Id128 {
    derive(&["order hold", user_id, idempotency_key])
}

/// Ledger hold of a trading hold opened by a call.
pub fn trading_hold(user_id: &str, idempotency_key: &str) -> Id128 {
    derive(&["trading hold", user_id, idempotency_key])
}

/// A hold id that nothing derives.
pub fn fresh_hold() -> Id128 {
    Id128::from_u128(Uuid::now_v7().as_u128())
}

/// Key of a session of a user.
pub fn session_key(user_id: &str, session_name: &str) -> Id128 {
    derive(&["session", user_id, session_name])
}

/// The number the trading path knows a client's order id by: the number itself where it is one, else a hash; never 0.
pub fn client_order_number(text: &str) -> u64 {
    match text.parse() {
        Ok(number) if number != 0 => number,
        _ => {
            let (high, low) = derive(&["client order", text]).halves();
            (high ^ low).max(1)
        }
    }
}

/// A UUID in its text form.
pub fn parse(text: &str) -> Option<Id128> {
    let id: Uuid = text.parse().ok()?;
    Some(Id128::from_u128(id.as_u128()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_ids_keep_calls_users_and_keys_apart() {
        let base = key_hash("PlaceOrder", "u1", "k");
        assert_eq!(base, key_hash("PlaceOrder", "u1", "k"));
        for other in [
            key_hash("CancelOrder", "u1", "k"),
            key_hash("PlaceOrder", "u2", "k"),
            key_hash("PlaceOrder", "u", "1k"),
            order_hold("u1", "k"),
            trading_hold("u1", "k"),
        ] {
            assert_ne!(base, other);
        }
        assert_eq!(client_order_number("42"), 42);
        assert_ne!(client_order_number("0"), 0);
        assert_eq!(client_order_number("abc"), client_order_number("abc"));
        assert_eq!(parse(&base.to_string()), Some(base));
    }
}
