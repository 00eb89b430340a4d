//! Compares the check of encoded requests with full decoding of the same bytes.

use prost::{Message, Name};
use prost_types::Timestamp;
use proto::cfa::v1::{AllotmentRule, Coupon, PlacementTerms, RegisterInstrumentRequest};
use proto::checks::{CONTEXT_ID_BYTES_MAX, ID_BYTES_MAX, TEXT_BYTES_MAX, problems};
use proto::common::v1::{Decimal, InstrumentType, RequestContext};
use proto::convert::{timestamp_us, to_timestamp_us};
use proto::payments::v1::ReconcileRequest;
use proto::times::{JSON_SECONDS, SECONDS, clamped};

/// Checks any bytes as two requests: one with a time, one with nested and repeated values of all
/// kinds.
pub fn check(bytes: &[u8]) {
    check_request::<ReconcileRequest>(bytes, |request| {
        is_bad_context(request.context.as_ref()) || is_bad_time(request.business_date.as_ref())
    });
    check_request(bytes, is_bad_registration);
    if let Ok(time) = Timestamp::decode(bytes) {
        check_time(time);
    }
}

/// Names every field, so that a new one is not left out.
fn is_bad_registration(request: &RegisterInstrumentRequest) -> bool {
    let RegisterInstrumentRequest {
        context,
        symbol,
        name,
        r#type,
        decimals: _,
        issuer_id,
        smart_contract_address,
        currency_code,
        issue_limit,
        nominal,
        coupons,
        issued_at,
        matures_at,
        tick_size,
        lot_size,
        price_band_low,
        price_band_high,
        document_hash,
        document_uri,
        placement,
        document: _,
    } = request;
    let texts = [
        name,
        smart_contract_address,
        currency_code,
        document_hash,
        document_uri,
    ];
    let numbers = [
        issue_limit,
        nominal,
        tick_size,
        lot_size,
        price_band_low,
        price_band_high,
    ];
    is_bad_context(context.as_ref())
        || [symbol, issuer_id]
            .iter()
            .any(|id| is_bad_id(id, ID_BYTES_MAX))
        || texts.iter().any(|text| is_bad_text(text, TEXT_BYTES_MAX))
        || numbers.iter().any(|number| is_bad_number(number.as_ref()))
        || [issued_at, matures_at]
            .iter()
            .any(|time| is_bad_time(time.as_ref()))
        || InstrumentType::try_from(*r#type).is_err()
        || coupons.iter().any(|coupon| {
            is_bad_time(coupon.pays_at.as_ref()) || is_bad_number(coupon.amount.as_ref())
        })
        || placement.as_ref().is_some_and(is_bad_placement)
}

fn is_bad_placement(placement: &PlacementTerms) -> bool {
    let PlacementTerms {
        opens_at,
        closes_at,
        price,
        minimum_sum,
        investor_minimum,
        investor_maximum,
        allotment,
    } = placement;
    let numbers = [price, minimum_sum, investor_minimum, investor_maximum];
    numbers.iter().any(|number| is_bad_number(number.as_ref()))
        || [opens_at, closes_at]
            .iter()
            .any(|time| is_bad_time(time.as_ref()))
        || AllotmentRule::try_from(*allotment).is_err()
}

fn is_bad_text(text: &str, bytes_max: usize) -> bool {
    text.len() > bytes_max || text.chars().any(char::is_control)
}

fn is_bad_id(id: &str, bytes_max: usize) -> bool {
    is_bad_text(id, bytes_max) || id.trim().len() != id.len()
}

fn is_bad_number(number: Option<&Decimal>) -> bool {
    number.is_some_and(|number| is_bad_text(&number.value, TEXT_BYTES_MAX))
}

fn is_bad_time(time: Option<&Timestamp>) -> bool {
    time.is_some_and(|time| {
        !SECONDS.contains(&time.seconds) || !(0..1_000_000_000).contains(&time.nanos)
    })
}

fn is_bad_context(context: Option<&RequestContext>) -> bool {
    context.is_some_and(|context| {
        let ids = [
            &context.request_id,
            &context.correlation_id,
            &context.idempotency_key,
            &context.user_id,
            &context.trace_id,
            &context.source,
        ];
        ids.iter().any(|id| is_bad_id(id, CONTEXT_ID_BYTES_MAX))
            || is_bad_time(context.occurred_at.as_ref())
    })
}

/// Asserts that no request that decodes passes with a bad value, and that problems name their
/// field.
fn check_request<M>(bytes: &[u8], is_bad: impl Fn(&M) -> bool)
where
    M: Message + Name + Default + std::fmt::Debug,
{
    let found = problems(&M::full_name(), bytes);
    for (field, problem) in &found {
        let is_problem = problem.starts_with("must ") || problem.starts_with("has no value ");
        assert!(!field.is_empty() && is_problem, "{field}: {problem}");
    }
    let Ok(message) = M::decode(bytes) else {
        return;
    };
    let is_bad = is_bad(&message);
    assert!(!is_bad || !found.is_empty(), "{message:?} passes");
    // A field may occur several times; the re-encoded request has the merged one.
    let again = problems(&M::full_name(), &message.encode_to_vec());
    assert_eq!(is_bad, !again.is_empty(), "{message:?}: {again:?}");
}

fn check_time(time: Timestamp) {
    let shown = clamped(time);
    assert!(JSON_SECONDS.contains(&shown.seconds) && (0..1_000_000_000).contains(&shown.nanos));
    assert_eq!(clamped(shown), shown);
    let us = timestamp_us(&shown);
    let whole = Timestamp {
        nanos: shown.nanos / 1_000 * 1_000,
        ..shown
    };
    assert_eq!(to_timestamp_us(us), whole);
    // The conversion accepts every number.
    let _ = to_timestamp_us(timestamp_us(&time));
}

pub fn seeds() -> Vec<Vec<u8>> {
    let at = |seconds, nanos| Some(Timestamp { seconds, nanos });
    let mut seeds = Vec::new();
    for time in [
        at(1_700_000_000, 5),
        at(-1, 0),
        at(i64::MAX, 999_999_999),
        at(0, -1),
    ] {
        let context = Some(RequestContext {
            occurred_at: time,
            ..Default::default()
        });
        let reconcile = ReconcileRequest {
            context: context.clone(),
            business_date: time,
        };
        let register = RegisterInstrumentRequest {
            context,
            symbol: "BOND".to_owned(),
            name: "A bond".to_owned(),
            r#type: InstrumentType::CfaBond.into(),
            coupons: vec![
                Coupon {
                    pays_at: time,
                    ..Default::default()
                };
                2
            ],
            matures_at: time,
            placement: Some(PlacementTerms {
                opens_at: time,
                ..Default::default()
            }),
            ..Default::default()
        };
        seeds.extend([reconcile.encode_to_vec(), register.encode_to_vec()]);
        seeds.extend(time.map(|time| time.encode_to_vec()));
    }
    seeds
}
