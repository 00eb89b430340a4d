//! Texts of rejections: one per reject reason, with the limit value in words.
//!
//! `docs/protocol.md` has the same table; a test compares them.

use types::RejectReason;
use wire::{REQUEST_DONE, Rejected};

/// Text of each reason, and the phrase for its limit value with `{limit}` in place of the value;
/// no phrase for a reason without a limit. Indexed by code.
const TEXTS: &[(RejectReason, &str, &str)] = &[
    (
        RejectReason::InstrumentHalted,
        "trading on the instrument is halted",
        "",
    ),
    (
        RejectReason::InstrumentMatured,
        "the instrument has matured",
        "",
    ),
    (
        RejectReason::InstrumentPreOpen,
        "the market is not open yet, and the order would not simply rest",
        "",
    ),
    (
        RejectReason::UnknownInstrument,
        "the exchange has no instrument with this number",
        "",
    ),
    (
        RejectReason::PriceBand,
        "the price is outside the price band",
        "the band ends at {limit} ticks",
    ),
    (
        RejectReason::PostOnly,
        "the post-only order would trade at once",
        "",
    ),
    (
        RejectReason::PriceTick,
        "the price is out of range",
        "it must be 1 to {limit} ticks",
    ),
    (
        RejectReason::QuantityLot,
        "the quantity is out of range",
        "it must be 1 to {limit} lots",
    ),
    (
        RejectReason::InsufficientBalance,
        "the money or units are insufficient",
        "{limit} minor units are undrawn in the hold",
    ),
    (
        RejectReason::NoTradingHold,
        "the user has no trading hold of the asset",
        "",
    ),
    (
        RejectReason::UnknownOrder,
        "the exchange has no order with this id",
        "",
    ),
    (
        RejectReason::OrderNotOpen,
        "the order is already filled or cancelled",
        "",
    ),
    (
        RejectReason::NotOwner,
        "the order, hold or session belongs to another user",
        "",
    ),
    (
        RejectReason::Throttle,
        "too many requests",
        "the next one is accepted in {limit} us",
    ),
    (
        RejectReason::Busy,
        "the exchange is busy, send the request again",
        "",
    ),
    (
        RejectReason::SettlementBacklog,
        "settlement lags: new orders, and amends that improve or enlarge one, are refused",
        "",
    ),
    (
        RejectReason::DuplicateClientOrderId,
        "another open order of the user has this client order id",
        "",
    ),
    (
        RejectReason::AlreadySeen,
        "the client sequence was used before, and its report is not available",
        "",
    ),
    (
        RejectReason::UnknownSession,
        "the session is not logged in on this channel",
        "",
    ),
    (
        RejectReason::UnknownUser,
        "the exchange does not know the user",
        "",
    ),
    (RejectReason::UserBlocked, "the user is blocked", ""),
    (
        RejectReason::LimitExceeded,
        "the user's limit is exceeded",
        "{limit} kopecks are left of the day's trading limit",
    ),
    (
        RejectReason::KycRequired,
        "the user's KYC level is too low for trading",
        "",
    ),
    (
        RejectReason::InvalidCombination,
        "order type, time in force, post only and expiry do not fit together",
        "",
    ),
    (RejectReason::Expired, "the order's expiry has passed", ""),
    (
        RejectReason::InvalidAmend,
        "the amend changes nothing, leaves nothing open, or is of a market order",
        "",
    ),
    (
        RejectReason::TooManyOrders,
        "the exchange has the maximum number of open orders",
        "",
    ),
    (
        RejectReason::AmountOverflow,
        "price times quantity is too large",
        "",
    ),
    (
        RejectReason::UnknownHold,
        "the hold is unknown or closed",
        "",
    ),
    (
        RejectReason::HoldInUse,
        "the hold is in use by open orders",
        "",
    ),
    (
        RejectReason::NotReady,
        "the exchange is not ready, send the request again later",
        "",
    ),
    (
        RejectReason::DuplicateRequest,
        "the request was answered before, or changes nothing",
        "",
    ),
    (
        RejectReason::Malformed,
        "a value of the request is out of range",
        "the maximum is {limit} seconds",
    ),
    (RejectReason::KillSwitch, "the kill switch is engaged", ""),
    (
        RejectReason::SessionsBacklog,
        "session messages lag: new orders, and amends that improve or enlarge one, are refused",
        "",
    ),
    (
        RejectReason::CheckpointBacklog,
        "checkpoints lag: new orders, and amends that improve or enlarge one, are refused",
        "",
    ),
    (
        RejectReason::ReplicaEnded,
        "new orders, and amends that improve or enlarge one, are refused until the exchange restarts",
        "",
    ),
    (
        RejectReason::UserOrderLimit,
        "the user has the maximum number of open orders",
        "{limit} orders",
    ),
    (
        RejectReason::InstrumentOrderLimit,
        "the user has the maximum number of open orders on the instrument",
        "{limit} orders",
    ),
    (
        RejectReason::InstrumentClosed,
        "the instrument's trading day is over",
        "",
    ),
    (
        RejectReason::OrderSizeLimit,
        "the order is too large",
        "the maximum is {limit} lots",
    ),
    (
        RejectReason::OrderValueLimit,
        "the order's value is too high",
        "the maximum is {limit} kopecks",
    ),
    (
        RejectReason::ClockUnconfirmed,
        "the exchange's clock is not confirmed: new orders, and amends that improve or enlarge one, are refused",
        "",
    ),
    (
        RejectReason::JournalQuota,
        "the user's journal quota is used up",
        "the next request is accepted in {limit} us",
    ),
    (
        RejectReason::OrderToTrade,
        "too many order messages for the user's trades",
        "the next order is accepted in {limit} us",
    ),
    (
        RejectReason::DiskLow,
        "a disk of the exchange is nearly full: new orders, and amends that improve or enlarge one, are refused",
        "",
    ),
    (
        RejectReason::SessionLimit,
        "the user has the maximum number of sessions",
        "{limit} sessions",
    ),
];

const _: () = {
    assert!(TEXTS.len() == RejectReason::ALL.len());
    let mut at = 0;
    while at < TEXTS.len() {
        assert!(TEXTS[at].0.code() as usize == at);
        at += 1;
    }
};

/// Describes a rejection in words, with its limit value.
pub fn reject_text(refusal: &Rejected) -> String {
    reason_text(refusal.reason, refusal.limit)
}

/// Describes a reject reason in words, with its limit value if that is not 0.
pub fn reason_text(reason: RejectReason, limit: u64) -> String {
    let (_, text, phrase) = TEXTS[usize::from(reason.code())];
    match limit == 0 || phrase.is_empty() {
        true => text.to_owned(),
        false => format!("{text}: {}", phrase.replace("{limit}", &limit.to_string())),
    }
}

/// Describes the outcome of `TradingHold`, `OpenOrdersEnd` or `RetransmitEnd` with its limit value.
/// `None` if the request was done.
pub fn outcome_text(outcome: u8, limit: u64) -> Option<String> {
    if outcome == REQUEST_DONE {
        return None;
    }
    Some(match RejectReason::from_code(outcome) {
        Some(reason) => reason_text(reason, limit),
        None => format!("reject code {outcome}"),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use types::command::RequestKind;

    use super::*;

    /// The reasons that the exchange sends with a limit value.
    const WITH_LIMIT: [RejectReason; 14] = [
        RejectReason::PriceBand,
        RejectReason::PriceTick,
        RejectReason::QuantityLot,
        RejectReason::InsufficientBalance,
        RejectReason::Throttle,
        RejectReason::LimitExceeded,
        RejectReason::Malformed,
        RejectReason::UserOrderLimit,
        RejectReason::InstrumentOrderLimit,
        RejectReason::OrderSizeLimit,
        RejectReason::OrderValueLimit,
        RejectReason::JournalQuota,
        RejectReason::OrderToTrade,
        RejectReason::SessionLimit,
    ];

    #[test]
    fn every_reason_has_its_own_text_and_none_loses_its_limit() {
        let mut texts = HashSet::new();
        for reason in RejectReason::ALL {
            let text = reason_text(*reason, 0);
            let name = reason.as_str().to_lowercase().replace('_', " ");
            assert!(
                text != name && !text.contains("{limit}"),
                "{reason}: {text}"
            );
            assert!(texts.insert(text.clone()), "{reason}: {text}");
            let with_limit = reason_text(*reason, 602_214);
            let has_limit = WITH_LIMIT.contains(reason);
            assert_eq!(with_limit.contains("602214"), has_limit, "{with_limit}");
            assert!(!with_limit.contains('{'), "{with_limit}");
            assert!(with_limit.starts_with(&text), "{with_limit}");
        }
    }

    #[test]
    fn the_limit_value_is_part_of_the_text() {
        let mut refusal = Rejected {
            client_seq: 1,
            client_order_id: 1,
            engine_order_id: 0,
            request: RequestKind::CancelAllAfter,
            reason: RejectReason::Malformed,
            limit: 600,
            node_sequence: 0,
            time_ns: 0,
            received_ns: 0,
        };
        let expected = "a value of the request is out of range: the maximum is 600 seconds";
        assert_eq!(reject_text(&refusal), expected);
        refusal.reason = RejectReason::UserBlocked;
        assert_eq!(reject_text(&refusal), "the user is blocked");
    }

    #[test]
    fn an_outcome_has_the_text_of_its_reason() {
        assert_eq!(outcome_text(REQUEST_DONE, 0), None);
        let throttled = outcome_text(RejectReason::Throttle.code(), 150).unwrap();
        assert!(throttled.ends_with("in 150 us"), "{throttled}");
        assert_eq!(outcome_text(254, 0).unwrap(), "reject code 254");
    }

    /// The table of reject reasons in `docs/protocol.md`.
    fn table() -> String {
        let head = "\n| code | reason | text | `limit` |\n|---:|---|---|---|\n".to_owned();
        let rows = TEXTS.iter().map(|(reason, text, phrase)| {
            let limit = match *phrase {
                "" => String::new(),
                phrase => phrase.replace("{limit}", "`limit`") + " ",
            };
            format!("| {} | `{reason}` | {text} | {limit}|\n", reason.code())
        });
        rows.fold(head, |table, row| table + &row) + "\n"
    }

    /// `PROTOCOL_DOC=write cargo test -p wire -p client protocol_document` writes the table.
    #[test]
    fn protocol_document_has_the_texts() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/protocol.md");
        let document = std::fs::read_to_string(path).unwrap();
        let (head, rest) = document.split_once("<!-- rejects -->\n").expect("a mark");
        let (_, tail) = rest.split_once("<!-- /rejects -->").expect("a mark");
        let expected = format!("{head}<!-- rejects -->\n{}<!-- /rejects -->{tail}", table());
        if std::env::var("PROTOCOL_DOC").is_ok_and(|value| value == "write") {
            std::fs::write(path, &expected).unwrap();
        } else {
            assert!(
                document == expected,
                "docs/protocol.md differs from the code: run PROTOCOL_DOC=write cargo test -p client protocol_document"
            );
        }
    }
}
