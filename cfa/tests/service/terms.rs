//! Terms of an issue that cannot be traded, paid or read are refused when they are set (D49).

use proto::cfa::v1 as pb;
use tonic_types::StatusExt;

use crate::world::*;

const DAY: i64 = 24 * 3_600;
/// Start of the world's clock.
const NOW: i64 = 1_800_000_000;

fn at(seconds: i64) -> Option<prost_types::Timestamp> {
    Some(prost_types::Timestamp { seconds, nanos: 0 })
}

fn coupon(pays_at: i64, amount: &str) -> pb::Coupon {
    pb::Coupon {
        pays_at: at(pays_at),
        amount: decimal(amount),
    }
}

fn fields(refused: &tonic::Status) -> Vec<String> {
    assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
    let details = refused.get_details_bad_request().expect("fields");
    let violations = details.field_violations.into_iter();
    violations.map(|violation| violation.field).collect()
}

type Change = fn(&mut pb::RegisterInstrumentRequest);

/// Changes of valid terms, with the field that is refused.
const BAD: [(&str, Change); 19] = [
    ("price_band_high", |terms| {
        terms.price_band_high = decimal(&"9".repeat(38));
    }),
    ("price_band_high", |terms| {
        terms.price_band_low = decimal("10.001");
        terms.price_band_high = decimal("10.009");
    }),
    ("tick_size", |terms| {
        terms.tick_size = decimal("92233720368547758.08");
    }),
    ("lot_size", |terms| {
        terms.lot_size = decimal("101");
    }),
    ("nominal", |terms| {
        terms.nominal = decimal("0.000000000000000001");
    }),
    ("nominal", |terms| {
        terms.nominal = decimal("92233720368547758.07");
    }),
    ("coupons.amount", |terms| {
        terms.coupons = vec![coupon(NOW + DAY, &"9".repeat(38))];
    }),
    ("coupons.amount", |terms| {
        terms.coupons = vec![coupon(NOW + DAY, "-0.01")];
    }),
    ("coupons.pays_at", |terms| {
        terms.coupons = vec![coupon(NOW + 366 * DAY, "1")];
    }),
    ("coupons.pays_at", |terms| {
        terms.issued_at = at(NOW + 2 * DAY);
        terms.coupons = vec![coupon(NOW + DAY, "1")];
    }),
    ("coupons[0].pays_at", |terms| {
        terms.coupons = vec![coupon(-62_135_596_800, "1")];
    }),
    ("matures_at", |terms| {
        terms.issued_at = at(NOW + 365 * DAY);
    }),
    ("name", |terms| terms.name = "\0".into()),
    ("name", |terms| terms.name = String::new()),
    ("document_hash", |terms| {
        terms.document_hash = "a".repeat(100_000);
    }),
    ("document_uri", |terms| {
        terms.document_uri = "a".repeat(1_025);
    }),
    ("symbol", |terms| terms.symbol = " BOND-1".into()),
    ("issuer_id", |terms| terms.issuer_id = "i".repeat(129)),
    ("type", |terms| terms.r#type = 999),
];

fn terms(request: &mut pb::RegisterInstrumentRequest) {
    request.matures_at = at(NOW + 365 * DAY);
    request.coupons = vec![coupon(NOW + DAY, "50.00"), coupon(NOW + 365 * DAY, "50.00")];
    request.issue_limit = decimal("100");
    request.tick_size = decimal("0.01");
    request.price_band_low = decimal("0.005");
    request.price_band_high = decimal("2000");
}

#[tokio::test(flavor = "multi_thread")]
async fn d49_terms_that_cannot_be_traded_or_paid_are_refused_at_registration() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for (field, change) in BAD {
        let refused = world.register(|request| {
            terms(request);
            change(request);
        });
        let refused = refused.await.expect_err(field);
        assert_eq!(fields(&refused), [field], "{refused}");
    }
    world.register(terms).await.expect("registered");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d49_a_typing_error_in_a_change_ends_no_issue() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let before = world.register(terms).await.expect("registered");
    type Change = fn(&mut pb::UpdateInstrumentRequest);
    let changes: [(&str, Change); 6] = [
        ("matures_at", |change| change.matures_at = at(NOW - 1)),
        ("matures_at", |change| {
            change.matures_at = at(-62_135_596_800)
        }),
        ("coupons.pays_at", |change| {
            change.matures_at = at(NOW + DAY)
        }),
        ("name", |change| change.name = Some(String::new())),
        ("price_band_high", |change| {
            change.price_band_high = decimal(&"9".repeat(38));
        }),
        ("document_hash", |change| {
            change.document_hash = Some("a".repeat(2_000));
        }),
    ];
    for (field, change) in changes {
        let mut request = pb::UpdateInstrumentRequest {
            context: context(&key()),
            instrument_id: "BOND-1".into(),
            ..Default::default()
        };
        change(&mut request);
        let mut operator = world.as_caller("sandbox.operator");
        let refused = operator.update_instrument(request).await;
        assert_eq!(fields(&refused.expect_err(field)), [field]);
    }
    world.resume_operations().await;
    assert_eq!(world.instrument("BOND-1").await, before);
    world.stop().await;
}
