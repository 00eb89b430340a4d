//! Units in answers of the ledger. A decimal there counts units of one instrument, which the object
//! or one around it names; decimals of other services may be prices or shares.

use serde_json::{Map, Value, json};

/// Prefix of the calls whose answers this module labels.
pub const CALLS: &str = "dfa.ledger.v1.";

/// Replaces each decimal by an amount in units of its instrument.
pub fn add(answer: &mut Value) {
    label(answer, None);
}

fn label(value: &mut Value, outer: Option<&str>) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| label(value, outer)),
        Value::Object(object) if is_amount(object) => {}
        Value::Object(object) => {
            let own = unit(object);
            let unit = own.as_deref().or(outer);
            for (_, value) in object.iter_mut() {
                match unit.filter(|_| is_decimal(value)) {
                    Some(unit) => *value = json!({ "currencyCode": unit, "amount": value.take() }),
                    None => label(value, unit),
                }
            }
        }
        _ => {}
    }
}

/// Instrument of an object: the one that it names, or that of its first amount.
fn unit(object: &Map<String, Value>) -> Option<String> {
    let of_amount = || {
        let mut amounts = object.values().filter_map(Value::as_object);
        amounts.find_map(|amount| text(amount, "currencyCode"))
    };
    text(object, "instrumentId").or_else(of_amount)
}

fn text(object: &Map<String, Value>, name: &str) -> Option<String> {
    let text = object.get(name)?.as_str()?;
    (!text.is_empty()).then(|| text.to_owned())
}

fn is_amount(object: &Map<String, Value>) -> bool {
    object.contains_key("currencyCode")
}

fn is_decimal(value: &Value) -> bool {
    let object = value.as_object().filter(|object| object.len() == 1);
    object.is_some_and(|object| object.get("value").is_some_and(Value::is_string))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::output;

    // rows: R350
    #[test]
    fn r350_decimals_of_the_ledger_have_the_unit_of_their_instrument() {
        let mut answer = json!({
            "subaccounts": [{ "instrumentId": "BOND-1", "balance": { "value": "5" } }],
            "hold": {
                "amount": { "currencyCode": "CFA-RUB", "amount": { "value": "9.50" } },
                "consumed": { "value": "1.00" },
                "expiresAt": "2026-11-21T10:00:00Z",
            },
            "total": { "value": "3" },
        });
        add(&mut answer);
        assert_eq!(
            output::text(&answer),
            "subaccounts:\n  instrumentId: BOND-1\n    balance: 5 BOND-1\n\
             hold:\n  amount: 9.50 CFA-RUB\n  consumed: 1.00 CFA-RUB\n  \
             expiresAt: 2026-11-21T10:00:00Z\n\
             total: 3\n"
        );
    }

    // rows: R350
    #[test]
    fn r350_an_inner_object_has_the_unit_of_the_outer_one() {
        let mut answer = json!({
            "instrumentId": "CFA-RUB", "lines": [{ "version": "1", "amount": { "value": "-2.00" } }],
        });
        add(&mut answer);
        assert_eq!(
            output::text(&answer),
            "instrumentId: CFA-RUB\nlines:\n  version: 1\n    amount: -2.00 CFA-RUB\n"
        );
    }
}
