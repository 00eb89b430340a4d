//! Texts of rejections.

use types::RejectReason;
use wire::Rejected;

/// Describes a rejection in words, with its limit value.
pub fn reject_text(refusal: &Rejected) -> String {
    let limit = refusal.limit;
    match refusal.reason {
        RejectReason::Throttle => {
            format!("too many requests: the next one is accepted in {limit} us")
        }
        RejectReason::JournalQuota => format!(
            "the user's journal quota is used up: the next request is accepted in {limit} us"
        ),
        RejectReason::OrderToTrade => format!(
            "too many order messages for the user's trades: the next order is accepted in {limit} us"
        ),
        RejectReason::UserOrderLimit => {
            format!("the user has the maximum of {limit} open orders")
        }
        RejectReason::InstrumentOrderLimit => {
            format!("the user has the maximum of {limit} open orders on the instrument")
        }
        RejectReason::OrderSizeLimit => format!("an order may have at most {limit} lots"),
        RejectReason::OrderValueLimit => {
            format!("an order may have a value of at most {limit} kopecks")
        }
        RejectReason::InsufficientBalance => {
            format!("the trading hold has only {limit} minor units undrawn")
        }
        RejectReason::LimitExceeded => {
            format!("the user's trading limit has only {limit} kopecks left today")
        }
        RejectReason::Busy => "the exchange is busy: send the request again".to_owned(),
        reason => reason.as_str().to_ascii_lowercase().replace('_', " "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_value_is_part_of_the_text() {
        let mut refusal = Rejected {
            client_seq: 1,
            client_order_id: 1,
            engine_order_id: 0,
            request: types::command::RequestKind::New,
            reason: RejectReason::Throttle,
            limit: 150,
            node_sequence: 0,
            time_ns: 0,
            received_ns: 0,
        };
        assert!(reject_text(&refusal).ends_with("in 150 us"));
        refusal.reason = RejectReason::PriceBand;
        assert_eq!(reject_text(&refusal), "price band");
    }
}
