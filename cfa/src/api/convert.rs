//! Conversions between messages and the service's own types, and from refusals to statuses (D23).

use proto::cfa::v1 as pb;
use proto::common::v1 as common;
use proto::convert::{self, ConvertError};
use rpc::status;
use sha2::{Digest, Sha256};
use tonic::Status;
use types::{Decimal, derived};

use crate::error::{Error, Refusal};
use crate::model::{
    ActBasis, ActKind, Batch, CFA_RUB, CFA_RUB_DECIMALS, Coupon, CouponPayment, EnforcementAct,
    Extract, ExtractFormat, Instrument, InstrumentStatus, InstrumentType, IssueDecision,
    IssueRedemption, Offer, Operation, RedemptionLine, SuspendedDeposit, TokenMove, TradeLeg,
};
use crate::placement::{Allotment, Placement};
use crate::service::{
    HashAlgorithm, InstrumentChange, NewInstrument, NewPlacement, Replayed, units,
};
use chain::{Address, ChainError};

/// Maps an error to the caller's status.
pub fn to_status(error: Error) -> Status {
    match error {
        Error::Refused(refusal) => refusal_status(&refusal),
        Error::Peer(status) => status,
        Error::Unavailable(peer) => status::unavailable(peer, 1_000),
        Error::Chain(ChainError::Unavailable(reason)) => {
            tracing::warn!(reason, "chain unavailable");
            status::unavailable("Blockchain", 1_000)
        }
        Error::Chain(ChainError::Refused(reason)) => {
            status::failed_precondition("CHAIN_REFUSED", reason)
        }
        other => status::internal(&other),
    }
}

fn refusal_status(refusal: &Refusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        Refusal::OperationNotFound => status::not_found("OPERATION_NOT_FOUND", text),
        Refusal::InstrumentNotFound => status::not_found("INSTRUMENT_NOT_FOUND", text),
        Refusal::RedemptionNotFound => status::not_found("REDEMPTION_NOT_FOUND", text),
        Refusal::CouponNotFound => status::not_found("COUPON_NOT_FOUND", text),
        Refusal::BatchNotFound => status::not_found("BATCH_NOT_FOUND", text),
        Refusal::DepositNotFound => status::not_found("DEPOSIT_NOT_FOUND", text),
        Refusal::UserNotFound => status::not_found("USER_NOT_FOUND", text),
        Refusal::BreakNotFound => status::not_found("BREAK_NOT_FOUND", text),
        Refusal::BlockNotFound => status::not_found("BLOCK_NOT_FOUND", text),
        Refusal::KycTooLowForWithdrawal | Refusal::KycTooLow => {
            status::failed_precondition("KYC_LEVEL_TOO_LOW", text)
        }
        Refusal::InsufficientBalance => status::failed_precondition("INSUFFICIENT_BALANCE", text),
        Refusal::PayoutFailed => status::failed_precondition("PAYOUT_FAILED", text),
        Refusal::InstrumentExists => status::already_exists("INSTRUMENT_EXISTS", text),
        Refusal::InstrumentNotActive => status::failed_precondition("INSTRUMENT_NOT_ACTIVE", text),
        Refusal::TermsImmutable => status::failed_precondition("TERMS_IMMUTABLE", text),
        Refusal::DecisionUnsigned => status::failed_precondition("DECISION_UNSIGNED", text),
        Refusal::NoAuthority => status::failed_precondition("NO_CERTIFICATE_AUTHORITY", text),
        Refusal::NoExtractKey => status::failed_precondition("NO_EXTRACT_KEY", text),
        Refusal::TooManyExtracts => status::failed_precondition("TOO_MANY_EXTRACTS", text),
        Refusal::ActNotFound => status::not_found("ACT_NOT_FOUND", text),
        Refusal::AlreadyFrozen => status::failed_precondition("ALREADY_FROZEN", text),
        Refusal::TooManyFreezes => status::failed_precondition("TOO_MANY_FREEZES", text),
        Refusal::ReceiverSanctioned(_) => status::failed_precondition("SANCTIONS_HIT", text),
        Refusal::TooManyDrafts => status::failed_precondition("TOO_MANY_DRAFTS", text),
        Refusal::OperationState => status::failed_precondition("OPERATION_STATE", text),
        Refusal::ApprovalRequired => {
            status::approval_required("dfa.cfa.v1.CfaRegistryService/UpdateInstrument")
        }
        Refusal::DepositResolved => status::failed_precondition("DEPOSIT_RESOLVED", text),
        Refusal::PaymentUnpaid => status::failed_precondition("PAYMENT_NOT_PAID", text),
        Refusal::RedemptionExists => status::already_exists("REDEMPTION_EXISTS", text),
        Refusal::NominalMissing => status::failed_precondition("NOMINAL_MISSING", text),
        Refusal::NothingToPay => status::failed_precondition("NOTHING_TO_PAY", text),
        Refusal::NotMatured | Refusal::UnitsNotMatured => {
            status::failed_precondition("NOT_MATURED", text)
        }
        Refusal::OperationsOpen => status::failed_precondition("OPERATIONS_OPEN", text),
        Refusal::PayoutIdTaken => status::already_exists("PAYOUT_ID_TAKEN", text),
        Refusal::ReferenceTaken => status::already_exists("REFERENCE_TAKEN", text),
        Refusal::ContractUnfit(_) => status::failed_precondition("CONTRACT_UNFIT", text),
        Refusal::SubscriptionNotFound => status::not_found("SUBSCRIPTION_NOT_FOUND", text),
        Refusal::UserBlocked => status::failed_precondition("USER_BLOCKED", text),
        Refusal::NotSubscribed => status::failed_precondition("NOT_SUBSCRIBED", text),
        Refusal::TooManySubscriptions => {
            status::failed_precondition("TOO_MANY_SUBSCRIPTIONS", text)
        }
        Refusal::OfferNotFound => status::not_found("OFFER_NOT_FOUND", text),
        Refusal::NotOffered => status::failed_precondition("NOT_OFFERED", text),
        Refusal::TooManyOffers => status::failed_precondition("TOO_MANY_OFFERS", text),
        Refusal::PlacementNotFound => status::not_found("PLACEMENT_NOT_FOUND", text),
        Refusal::PlacementNotOpen => status::failed_precondition("PLACEMENT_NOT_OPEN", text),
        Refusal::PlacementUnderWay => status::failed_precondition("PLACEMENT_UNDER_WAY", text),
        Refusal::PlacementOnly => status::failed_precondition("PLACEMENT_ONLY", text),
        Refusal::LimitExceeded(_) => status::failed_precondition("LIMIT_EXCEEDED", text),
        Refusal::TokenQuarantined => status::failed_precondition("TOKEN_QUARANTINED", text),
        Refusal::BreakChanged => status::failed_precondition("BREAK_CHANGED", text),
        Refusal::BreakOpen => status::failed_precondition("BREAK_OPEN", text),
        Refusal::NotQuarantined => status::failed_precondition("NOT_QUARANTINED", text),
        Refusal::StillImpossible => status::failed_precondition("STILL_IMPOSSIBLE", text),
        Refusal::HoldersMoving => status::failed_precondition("HOLDERS_MOVING", text),
        Refusal::MoveNotFound => status::not_found("MOVE_NOT_FOUND", text),
        Refusal::TokenInUse(_) => status::failed_precondition("TOKEN_IN_USE", text),
        Refusal::OwnerElsewhere => status::failed_precondition("OWNER_ELSEWHERE", text),
        Refusal::AddressTaken => status::failed_precondition("ADDRESS_TAKEN", text),
        Refusal::Field { field, why } => status::invalid_argument(*field, why.clone()),
    }
}

fn invalid(field: &'static str) -> impl FnOnce(ConvertError) -> Error {
    move |error| Refusal::field(field, error.to_string()).into()
}

/// Checks a required id.
pub fn id(field: &'static str, text: String) -> Result<String, Error> {
    if text.is_empty() {
        return Err(Refusal::field(field, "must not be empty").into());
    }
    Ok(text)
}

/// Checks a user's id. `:` separates the parts of sub-account names (T36).
pub fn user_id(field: &'static str, text: String) -> Result<String, Error> {
    if text.contains(':') {
        return Err(Refusal::field(field, "must not contain `:`").into());
    }
    id(field, text)
}

/// Checks the caller's reference of a redemption, which may be empty. `:` separates the parts of
/// this service's own references in the same scope, such as `<redemption>:<address>` of a maturing
/// issue.
pub fn redemption_reference(field: &'static str, text: String) -> Result<String, Error> {
    if text.contains(':') {
        return Err(Refusal::field(field, "must not contain `:`").into());
    }
    Ok(text)
}

/// Checks the payout id of a redemption. `refund-<payment>` is reserved for refunds of deposits.
pub fn payout_id(field: &'static str, text: String) -> Result<String, Error> {
    if text.starts_with("refund-") {
        return Err(Refusal::field(field, "must not start with `refund-`").into());
    }
    id(field, redemption_reference(field, text)?)
}

/// Reads a positive amount of roubles.
pub fn roubles(field: &'static str, money: Option<&common::Money>) -> Result<Decimal, Error> {
    let money = money.ok_or(ConvertError::Missing).map_err(invalid(field))?;
    convert::currency(&money.currency_code, "RUB").map_err(invalid(field))?;
    convert::positive(money.amount.as_ref()).map_err(invalid(field))
}

/// Reads a positive amount of an instrument. The currency code is optional.
pub fn amount_of(
    field: &'static str,
    instrument_id: &str,
    amount: Option<&common::MonetaryAmount>,
) -> Result<Decimal, Error> {
    let amount = amount
        .ok_or(ConvertError::Missing)
        .map_err(invalid(field))?;
    if !amount.currency_code.is_empty() {
        convert::currency(&amount.currency_code, instrument_id).map_err(invalid(field))?;
    }
    convert::positive(amount.amount.as_ref()).map_err(invalid(field))
}

/// Reads an amount of CFA-RUB, at least zero, as kopecks. Unset is zero.
pub fn money_leg(field: &'static str, value: Option<&common::Decimal>) -> Result<i64, Error> {
    let value = convert::optional_decimal(value)
        .map_err(invalid(field))?
        .unwrap_or(Decimal::ZERO);
    if value.is_negative() {
        return Err(Refusal::field(field, "must not be negative").into());
    }
    Ok(units(field, value, CFA_RUB_DECIMALS)?)
}

/// Reads an investor's payment as kopecks. Unset is zero; a payment of zero is refused.
pub fn payment(field: &'static str, value: Option<&common::MonetaryAmount>) -> Result<i64, Error> {
    match value {
        None => Ok(0),
        Some(_) => Ok(units(
            field,
            amount_of(field, CFA_RUB, value)?,
            CFA_RUB_DECIMALS,
        )?),
    }
}

pub fn hash_algorithm(code: i32) -> Result<HashAlgorithm, Error> {
    match common::HashAlgorithm::try_from(code) {
        Ok(common::HashAlgorithm::Unspecified | common::HashAlgorithm::Keccak256) => {
            Ok(HashAlgorithm::Keccak256)
        }
        Ok(common::HashAlgorithm::Sha256) => Ok(HashAlgorithm::Sha256),
        Ok(common::HashAlgorithm::Streebog256) => Ok(HashAlgorithm::Streebog256),
        Err(_) => Err(Refusal::field("algorithm", "is not a known algorithm").into()),
    }
}

fn optional(
    field: &'static str,
    value: Option<&common::Decimal>,
) -> Result<Option<Decimal>, Error> {
    convert::optional_decimal(value).map_err(invalid(field))
}

fn time(value: Option<&prost_types::Timestamp>) -> Option<i64> {
    value.map(convert::timestamp_us)
}

pub fn subscription(of: &Offer, decimals: u8) -> pb::Subscription {
    let (money, allotted) = (convert::to_monetary_amount_minor, of.allotted_number > 0);
    pb::Subscription {
        subscription_id: of.offer_id.clone(),
        instrument_id: of.instrument_id.clone(),
        investor_id: of.user_id.clone(),
        amount: offered_units(of, decimals),
        payment: offered_payment(of),
        status: of.status.code(),
        expires_at: wire_time(of.expires_at_us),
        hold_id: derived::offer_hold(&of.offer_id).to_string(),
        operation_id: of.operation_id.clone(),
        created_at: wire_time(of.created_at_us),
        updated_at: wire_time(of.updated_at_us),
        allotted: allotted.then(|| money(&of.instrument_id, of.allotted_minor, decimals)),
        allotted_payment: allotted
            .then(|| money(CFA_RUB, of.allotted_payment_minor, CFA_RUB_DECIMALS)),
    }
}

pub fn offer(of: &Offer, decimals: u8) -> pb::Offer {
    pb::Offer {
        offer_id: of.offer_id.clone(),
        instrument_id: of.instrument_id.clone(),
        holder_id: of.user_id.clone(),
        amount: offered_units(of, decimals),
        payment: offered_payment(of),
        status: of.status.code(),
        expires_at: wire_time(of.expires_at_us),
        hold_id: derived::offer_hold(&of.offer_id).to_string(),
        operation_id: of.operation_id.clone(),
        created_at: wire_time(of.created_at_us),
        updated_at: wire_time(of.updated_at_us),
    }
}

fn offered_units(of: &Offer, decimals: u8) -> Option<common::MonetaryAmount> {
    let (id, units_minor) = (&of.instrument_id, of.units_minor);
    Some(convert::to_monetary_amount_minor(id, units_minor, decimals))
}

fn offered_payment(of: &Offer) -> Option<common::MonetaryAmount> {
    let (kopecks, decimals) = (of.payment_minor, CFA_RUB_DECIMALS);
    Some(convert::to_monetary_amount_minor(
        CFA_RUB, kopecks, decimals,
    ))
}

fn new_placement(terms: pb::PlacementTerms) -> Result<NewPlacement, Error> {
    let required = |field, value: Option<prost_types::Timestamp>| {
        time(value.as_ref()).ok_or_else(|| Refusal::field(field, "is required"))
    };
    let number = |field, value: Option<common::Decimal>| optional(field, value.as_ref());
    Ok(NewPlacement {
        opens_at_us: required("placement.opens_at", terms.opens_at)?,
        closes_at_us: required("placement.closes_at", terms.closes_at)?,
        price: number("placement.price", terms.price)?,
        minimum_sum: number("placement.minimum_sum", terms.minimum_sum)?,
        investor_minimum: number("placement.investor_minimum", terms.investor_minimum)?,
        investor_maximum: number("placement.investor_maximum", terms.investor_maximum)?,
        allotment: match terms.allotment {
            0 => Allotment::FirstCome,
            code => Allotment::from_code(code)
                .ok_or_else(|| Refusal::field("placement.allotment", "is not a known rule"))?,
        },
    })
}

/// A placement of an instrument with these decimals.
pub fn placement(of: &Placement, decimals: u8) -> pb::Placement {
    let units = |minor| Some(convert::to_decimal_minor(minor, decimals));
    let roubles = |minor| Some(convert::to_decimal_minor(minor, CFA_RUB_DECIMALS));
    let terms = &of.terms;
    let bound = |minor: i64| match minor {
        0 => None,
        minor => units(minor),
    };
    pb::Placement {
        terms: Some(pb::PlacementTerms {
            opens_at: wire_time(terms.opens_at_us),
            closes_at: wire_time(terms.closes_at_us),
            price: Some(convert::to_decimal(terms.price)),
            minimum_sum: roubles(terms.minimum_minor).filter(|_| terms.minimum_minor > 0),
            investor_minimum: bound(terms.investor_min_minor),
            investor_maximum: bound(terms.investor_max_minor),
            allotment: terms.allotment.code(),
        }),
        status: of.status().code(),
        subscriptions: u32::try_from(of.live).unwrap_or_default(),
        subscribed: units(of.subscribed_minor),
        allotted: units(of.allotted_minor),
        issued: units(of.issued_minor),
        raised: roubles(of.raised_minor),
        closed_at: of.closed_at_us.and_then(wire_time),
    }
}

pub fn new_instrument(request: pb::RegisterInstrumentRequest) -> Result<NewInstrument, Error> {
    let kind = InstrumentType::from_code(request.r#type)
        .ok_or_else(|| Refusal::field("type", "must be one of the instrument types"))?;
    let decimals = u8::try_from(request.decimals)
        .map_err(|_| Refusal::field("decimals", "must be at most 18"))?;
    let coupons = request
        .coupons
        .iter()
        .map(|coupon| {
            Ok(Coupon {
                pays_at_us: time(coupon.pays_at.as_ref())
                    .ok_or_else(|| Refusal::field("coupons.pays_at", "is required"))?,
                amount: convert::decimal(coupon.amount.as_ref())
                    .map_err(invalid("coupons.amount"))?,
            })
        })
        .collect::<Result<_, Error>>()?;
    Ok(NewInstrument {
        symbol: request.symbol,
        name: request.name,
        kind,
        decimals,
        issuer_id: request.issuer_id,
        contract_address: request.smart_contract_address,
        currency_code: request.currency_code,
        issue_limit: optional("issue_limit", request.issue_limit.as_ref())?,
        nominal: optional("nominal", request.nominal.as_ref())?,
        coupons,
        issued_at_us: time(request.issued_at.as_ref()),
        matures_at_us: time(request.matures_at.as_ref()),
        tick_size: optional("tick_size", request.tick_size.as_ref())?,
        lot_size: optional("lot_size", request.lot_size.as_ref())?,
        price_band_low: optional("price_band_low", request.price_band_low.as_ref())?,
        price_band_high: optional("price_band_high", request.price_band_high.as_ref())?,
        document_hash: request.document_hash,
        document_uri: request.document_uri,
        document: request.document.to_vec(),
        placement: request.placement.map(new_placement).transpose()?,
    })
}

pub fn issue_decision(instrument: &Instrument, decision: IssueDecision) -> pb::IssueDecision {
    pb::IssueDecision {
        instrument_id: decision.instrument_id,
        document_hash: instrument.document_hash.clone(),
        document_uri: instrument.document_uri.clone(),
        document: decision.document.into(),
        signature: decision.signature.into(),
        signer: decision.signer,
        certificate_serial: decision.certificate_serial,
        signed_at: decision.signed_at_us.and_then(wire_time),
        activated_by: decision.activated_by,
        activated_at: decision.activated_at_us.and_then(wire_time),
    }
}

pub fn instrument_change(request: pb::UpdateInstrumentRequest) -> Result<InstrumentChange, Error> {
    let status = match request.status {
        0 => None,
        code => Some(
            InstrumentStatus::from_code(code)
                .ok_or_else(|| Refusal::field("status", "must be one of the instrument states"))?,
        ),
    };
    Ok(InstrumentChange {
        status,
        issue_limit: optional("issue_limit", request.issue_limit.as_ref())?,
        price_band_low: optional("price_band_low", request.price_band_low.as_ref())?,
        price_band_high: optional("price_band_high", request.price_band_high.as_ref())?,
        matures_at_us: time(request.matures_at.as_ref()),
        name: request.name,
        document_hash: request.document_hash,
        document_uri: request.document_uri,
        may_end_halt: false,
    })
}

pub fn trade_leg(leg: pb::TradeLeg) -> Result<TradeLeg, Error> {
    if leg.trade_number == 0 {
        return Err(Refusal::field("trades.trade_number", "must be at least 1").into());
    }
    Ok(TradeLeg {
        trade_id: id("trades.trade_id", leg.trade_id)?,
        instrument_id: id("trades.instrument_id", leg.instrument_id)?,
        trade_number: leg.trade_number,
        buyer_id: user_id("trades.buyer_id", leg.buyer_id)?,
        seller_id: user_id("trades.seller_id", leg.seller_id)?,
        quantity: convert::positive(leg.quantity.as_ref()).map_err(invalid("trades.quantity"))?,
        payment_minor: money_leg("trades.payment", leg.payment.as_ref())?,
        fee_minor: money_leg("trades.fee", leg.fee.as_ref())?,
    })
}

fn wire_time(time_us: i64) -> Option<prost_types::Timestamp> {
    Some(convert::to_timestamp_us(time_us))
}

pub fn operation(operation: &Operation) -> pb::CfaOperation {
    let (rejection_reason, rejection_message) = match &operation.rejection {
        Some((reason, message)) => (reason.code(), message.clone()),
        None => (0, String::new()),
    };
    pb::CfaOperation {
        operation_id: operation.operation_id.clone(),
        r#type: operation.flow.kind().code(),
        status: operation.status.code(),
        user_id: operation.user_id.clone(),
        hold_id: operation.hold_id.clone(),
        amount: Some(convert::to_decimal(operation.amount)),
        currency_code: operation.currency_code.clone(),
        idempotency_key: operation.idempotency_key.clone(),
        external_ref: operation.external_ref.clone(),
        onchain_tx_hash: operation.tx_hash.clone().unwrap_or_default(),
        rejection_reason,
        rejection_message,
        finalized_at: operation.finalized_at_us.and_then(wire_time),
        instrument_id: operation.instrument_id.clone(),
        from_user_id: operation.from_user_id.clone(),
        to_user_id: operation.to_user_id.clone(),
        trade_id: operation.trade_id.clone(),
        bookbuilding_id: operation.bookbuilding_id.clone(),
        created_at: wire_time(operation.created_at_us),
        updated_at: wire_time(operation.updated_at_us),
        block_number: operation.block_number.unwrap_or_default(),
        attempts: operation.attempts,
    }
}

pub fn instrument(instrument: &Instrument, placed: Option<&Placement>) -> pb::Instrument {
    let minor = |units: i64| convert::to_decimal_minor(units, instrument.decimals);
    pb::Instrument {
        instrument_id: instrument.instrument_id.clone(),
        symbol: instrument.instrument_id.clone(),
        name: instrument.name.clone(),
        r#type: instrument.kind.code(),
        decimals: u32::from(instrument.decimals),
        issuer_id: instrument.issuer_id.clone(),
        smart_contract_address: instrument.contract_address.clone(),
        currency_code: instrument.currency_code.clone(),
        status: instrument.status.code(),
        issue_limit: instrument.issue_limit_minor.map(minor),
        issued: Some(minor(instrument.issued_minor)),
        nominal: instrument.nominal.map(convert::to_decimal),
        coupons: instrument
            .coupons
            .iter()
            .map(|coupon| pb::Coupon {
                pays_at: wire_time(coupon.pays_at_us),
                amount: Some(convert::to_decimal(coupon.amount)),
            })
            .collect(),
        issued_at: instrument.issued_at_us.and_then(wire_time),
        matures_at: instrument.matures_at_us.and_then(wire_time),
        tick_size: Some(convert::to_decimal(instrument.tick_size)),
        lot_size: Some(convert::to_decimal(instrument.lot_size)),
        price_band_low: instrument.price_band_low.map(convert::to_decimal),
        price_band_high: instrument.price_band_high.map(convert::to_decimal),
        document_hash: instrument.document_hash.clone(),
        document_uri: instrument.document_uri.clone(),
        registered_at: wire_time(instrument.registered_at_us),
        updated_at: wire_time(instrument.updated_at_us),
        placement: placed.map(|placed| placement(placed, instrument.decimals)),
    }
}

pub fn redemption(
    redemption: &IssueRedemption,
    payments: Vec<pb::RedemptionPayment>,
) -> pb::IssueRedemption {
    pb::IssueRedemption {
        redemption_id: redemption.redemption_id.clone(),
        instrument_id: redemption.instrument_id.clone(),
        reason: redemption.reason.code(),
        status: redemption.status.code(),
        record_date: wire_time(redemption.record_date_us),
        total: Some(convert::to_monetary_amount_minor(
            CFA_RUB,
            redemption.total_minor,
            CFA_RUB_DECIMALS,
        )),
        payments,
        onchain_tx_hash: redemption.tx_hash.clone().unwrap_or_default(),
        created_at: wire_time(redemption.created_at_us),
        finalized_at: redemption.finalized_at_us.and_then(wire_time),
    }
}

pub fn redemption_payment(line: &RedemptionLine, decimals: u8) -> pb::RedemptionPayment {
    pb::RedemptionPayment {
        user_id: line.user_id.clone(),
        quantity: Some(convert::to_decimal_minor(line.units_minor, decimals)),
        amount: Some(convert::to_monetary_amount_minor(
            CFA_RUB,
            line.payment_minor,
            CFA_RUB_DECIMALS,
        )),
    }
}

pub fn coupon(coupon: &CouponPayment) -> pb::CouponPayment {
    let total = coupon
        .recorded_at_us
        .map(|_| convert::to_monetary_amount_minor(CFA_RUB, coupon.total_minor, CFA_RUB_DECIMALS));
    pb::CouponPayment {
        instrument_id: coupon.instrument_id.clone(),
        number: coupon.number,
        pays_at: wire_time(coupon.pays_at_us),
        amount: Some(convert::to_decimal(coupon.amount)),
        status: coupon.status.code(),
        total,
        onchain_tx_hash: coupon.tx_hash.clone().unwrap_or_default(),
        recorded_at: coupon.recorded_at_us.and_then(wire_time),
        finalized_at: coupon.finalized_at_us.and_then(wire_time),
        payment_id: derived::coupon(&coupon.instrument_id, coupon.number).to_string(),
    }
}

pub fn enforcement_act(act: &EnforcementAct, decimals: u8) -> pb::EnforcementAct {
    let id = &act.instrument_id;
    let amount = |units| Some(convert::to_monetary_amount_minor(id, units, decimals));
    let of_units = !act.is_whole();
    let has_left = of_units && act.kind == ActKind::Freeze;
    pb::EnforcementAct {
        act_id: act.act_id.clone(),
        kind: act.kind.code(),
        basis: act.basis.code(),
        instrument_id: id.clone(),
        holder_id: act.holder_id.clone(),
        to_user_id: act.to_user_id.clone(),
        amount: of_units.then(|| amount(act.units_minor)).flatten(),
        left: has_left.then(|| amount(act.left_minor)).flatten(),
        document: act.document.clone(),
        lift_document: act.lift_document.clone(),
        freeze_id: act.freeze_id.clone(),
        status: act.status.code(),
        onchain_tx_hash: act.tx_hash.clone(),
        actor: act.actor.clone(),
        created_at: wire_time(act.created_at_us),
        updated_at: wire_time(act.updated_at_us),
    }
}

/// `is_stopped`: its transactions have reverted as often as they are tried.
pub fn holder_move(of: TokenMove, is_stopped: bool) -> pb::HolderMove {
    let status = match of.finished_at_us {
        Some(_) => pb::HolderMoveStatus::Done,
        None if is_stopped => pb::HolderMoveStatus::Stopped,
        None => pb::HolderMoveStatus::Moving,
    };
    pb::HolderMove {
        move_id: of.move_id,
        instrument_id: of.instrument_id,
        status: status.into(),
        step: of.step.as_str().to_owned(),
        old_contract_address: of.old_token,
        new_contract_address: of.new_token,
        parts_done: of.parts_done,
        onchain_tx_hash: of.tx_hash,
        reason: of.reason,
        actor: of.actor,
        started_at: wire_time(of.created_at_us),
        moved_at: (of.moved_at_us > 0).then(|| convert::to_timestamp_us(of.moved_at_us)),
        finished_at: of.finished_at_us.and_then(wire_time),
    }
}

/// Longest name of a document, in bytes. The ledger's records contain it with a prefix.
const DOCUMENT_BYTES_MAX: usize = 512;

/// Checks the required name of a document that orders an act.
pub fn document(field: &'static str, text: String) -> Result<String, Error> {
    if text.len() > DOCUMENT_BYTES_MAX {
        let why = format!("must have at most {DOCUMENT_BYTES_MAX} bytes");
        return Err(Refusal::field(field, why).into());
    }
    id(field, text)
}

/// Reads what orders an act. It is required.
pub fn basis(code: i32) -> Result<ActBasis, Error> {
    let why = "must be COURT, LEVY, INHERITANCE, RECOVERY or SANCTIONS";
    Ok(ActBasis::from_code(code).ok_or_else(|| Refusal::field("basis", why))?)
}

pub fn extract(extract: Extract) -> pb::Extract {
    let content_type = match extract.format {
        ExtractFormat::Csv => "text/csv; charset=utf-8",
        ExtractFormat::Text => "text/plain; charset=utf-8",
        ExtractFormat::Pdf => "application/pdf",
    };
    pb::Extract {
        sha256: hex::encode(Sha256::digest(&extract.content)),
        content_type: content_type.to_owned(),
        extract_id: extract.extract_id,
        instrument_id: extract.instrument_id,
        holder_id: extract.holder_id,
        as_of: wire_time(extract.as_of_us),
        issued_at: wire_time(extract.issued_at_us),
        format: extract.format.code(),
        recipient: extract.recipient.code(),
        document: extract.document,
        content: extract.content.into(),
        signature: extract.signature.into(),
        signer: extract.signer,
    }
}

pub fn batch(batch: Batch) -> pb::TradeBatch {
    pb::TradeBatch {
        batch_id: batch.batch_id,
        status: batch.status.code(),
        onchain_tx_hash: batch.tx_hash.unwrap_or_default(),
        block_number: batch.block_number.unwrap_or_default(),
        trades: batch.trades,
        failed_trade_ids: batch.failed_trade_ids,
        gas_used: batch.gas_used,
    }
}

pub fn deposit(deposit: &SuspendedDeposit) -> pb::SuspendedDeposit {
    pb::SuspendedDeposit {
        payment_id: deposit.payment_id.clone(),
        user_id: deposit.user_id.clone(),
        amount: Some(convert::to_money(deposit.amount_minor)),
        operation_id: deposit.operation_id.clone(),
        reason: deposit.reason.clone(),
        created_at: wire_time(deposit.created_at_us),
        resolved: deposit.resolved,
    }
}

/// A page of the chain's transfers.
pub fn chain_transfers(replayed: Replayed) -> Result<pb::ReplayChainTransfersResponse, Error> {
    let address = |side: Option<Address>| side.map(|side| side.to_string()).unwrap_or_default();
    let transfers = replayed
        .transfers
        .into_iter()
        .map(|(transfer, instrument)| {
            let quantity = i128::try_from(transfer.units)
                .ok()
                .and_then(|units| Decimal::new(units, instrument.decimals).ok())
                .ok_or_else(|| Error::Damaged("a transfer exceeds 38 digits".into()))?;
            Ok(pb::ChainTransfer {
                instrument_id: instrument.instrument_id,
                token_address: transfer.token.to_string(),
                from_address: address(transfer.from),
                to_address: address(transfer.to),
                quantity: Some(convert::to_decimal(quantity)),
                block_number: transfer.block_number,
            })
        })
        .collect::<Result<_, Error>>()?;
    Ok(pb::ReplayChainTransfersResponse {
        transfers,
        through_block: replayed.through,
        last_block: replayed.last,
    })
}
