//! Check of times in encoded requests, compared with full decoding of the same bytes.

use prost::{Message, Name};
use prost_types::Timestamp;
use proto::cfa::v1::{Coupon, RegisterInstrumentRequest};
use proto::common::v1::RequestContext;
use proto::convert::{timestamp_us, to_timestamp_us};
use proto::payments::v1::ReconcileRequest;
use proto::times::{JSON_SECONDS, SECONDS, clamped, problems};

/// Any bytes as two requests: one with a time, one with nested and repeated times.
pub fn check(bytes: &[u8]) {
    decoded::<ReconcileRequest>(bytes, |request| {
        let context = request
            .context
            .as_ref()
            .and_then(|context| context.occurred_at);
        vec![request.business_date, context]
    });
    decoded::<RegisterInstrumentRequest>(bytes, |request| {
        let context = request
            .context
            .as_ref()
            .and_then(|context| context.occurred_at);
        let coupons = request.coupons.iter().map(|coupon| coupon.pays_at);
        [context, request.issued_at, request.matures_at]
            .into_iter()
            .chain(coupons)
            .collect()
    });
    if let Ok(time) = Timestamp::decode(bytes) {
        check_time(time);
    }
}

/// No request that decodes passes with a time out of range. Problems name their field.
fn decoded<M: Message + Name + Default>(
    bytes: &[u8],
    times: impl Fn(&M) -> Vec<Option<Timestamp>>,
) {
    let found = problems(&M::full_name(), bytes);
    for (field, problem) in &found {
        assert!(!field.is_empty() && problem.starts_with("must "));
    }
    let Ok(message) = M::decode(bytes) else {
        return;
    };
    let is_bad = |time: &Timestamp| {
        !SECONDS.contains(&time.seconds) || !(0..1_000_000_000).contains(&time.nanos)
    };
    let bad: Vec<Timestamp> = times(&message)
        .into_iter()
        .flatten()
        .filter(is_bad)
        .collect();
    assert!(bad.is_empty() || !found.is_empty(), "{bad:?} passes");
    // Fields merged from several parts are checked again as a whole.
    let again = problems(&M::full_name(), &message.encode_to_vec());
    assert!(
        bad.is_empty() == again.is_empty(),
        "out of range: {bad:?}, reported: {again:?}"
    );
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
    // Every number is a time.
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
            coupons: vec![
                Coupon {
                    pays_at: time,
                    ..Default::default()
                };
                2
            ],
            matures_at: time,
            ..Default::default()
        };
        seeds.extend([reconcile.encode_to_vec(), register.encode_to_vec()]);
        seeds.extend(time.map(|time| time.encode_to_vec()));
    }
    seeds
}
