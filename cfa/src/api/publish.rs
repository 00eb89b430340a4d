//! Published events (specification 6.2, D27, D28) and audit records (D34).

use events::{Event, topics};
use prost::Message;
use proto::audit::v1 as audit;
use proto::cfa::v1 as pb;
use proto::common::v1 as common;
use proto::convert;
use proto::ledger::v1 as ledger;
use service_kit::audit::{Act, AuditRecord};
use uuid::Uuid;

use crate::model::{
    ActStatus, CFA_RUB, CFA_RUB_DECIMALS, EnforcementAct, Flow, Instrument, IssueRedemption,
    Operation, Status,
};
use crate::placement::Placement;
use chain::Address;

const SOURCE: &str = "cfa";

/// Derives an event id from the event's type and the object's id, so consumers recognise a repeat.
/// It is time-ordered if the object's id is (UUIDv7), so consumers' inboxes grow at one end.
fn event_id(type_name: &str, id: &str) -> Uuid {
    match id.parse::<Uuid>() {
        Ok(parent) => {
            let parent = types::Id128::from_u128(parent.as_u128());
            Uuid::from_u128(types::child_uuid(parent, &format!("cfa:{type_name}")).as_u128())
        }
        Err(_) => Uuid::new_v5(
            &Uuid::NAMESPACE_OID,
            format!("cfa:{type_name}:{id}").as_bytes(),
        ),
    }
}

fn event(
    topic: &str,
    id: Uuid,
    key: &str,
    type_name: &str,
    correlation_id: &str,
    at_us: i64,
    payload: Vec<u8>,
) -> Event {
    Event {
        id,
        topic: topic.to_owned(),
        key: key.to_owned(),
        type_name: type_name.to_owned(),
        subject: key.to_owned(),
        source: SOURCE.to_owned(),
        correlation_id: correlation_id.to_owned(),
        occurred_at_us: at_us,
        payload,
    }
}

fn context(correlation_id: &str, user_id: &str) -> Option<common::RequestContext> {
    let mut context = rpc::Context::new(SOURCE);
    context.correlation_id = correlation_id.to_owned();
    context.user_id = user_id.to_owned();
    Some(context.to_proto())
}

fn amount(operation: &Operation) -> Option<common::MonetaryAmount> {
    Some(convert::to_monetary_amount(
        &operation.instrument_id,
        operation.amount,
    ))
}

fn of_operation(operation: &Operation, type_name: &str, payload: Vec<u8>) -> Event {
    let id = event_id(type_name, &operation.operation_id);
    event(
        topics::CFA,
        id,
        &operation.operation_id,
        type_name,
        &operation.correlation_id,
        operation.updated_at_us,
        payload,
    )
}

fn tx_hash(operation: &Operation) -> String {
    operation.tx_hash.clone().unwrap_or_default()
}

pub fn issued(operation: &Operation) -> Event {
    let payload = pb::CfaIssuedEvent {
        context: context(&operation.correlation_id, &operation.user_id),
        operation_id: operation.operation_id.clone(),
        instrument_id: operation.instrument_id.clone(),
        holder_id: operation.user_id.clone(),
        amount: amount(operation),
        tx_hash: tx_hash(operation),
        issued_at: Some(convert::to_timestamp_us(operation.updated_at_us)),
    };
    of_operation(
        operation,
        "dfa.cfa.v1.CfaIssuedEvent",
        payload.encode_to_vec(),
    )
}

pub fn redeemed(operation: &Operation) -> Event {
    let payload = pb::CfaRedeemedEvent {
        context: context(&operation.correlation_id, &operation.user_id),
        operation_id: operation.operation_id.clone(),
        instrument_id: operation.instrument_id.clone(),
        holder_id: operation.user_id.clone(),
        amount: amount(operation),
        tx_hash: tx_hash(operation),
        redeemed_at: Some(convert::to_timestamp_us(operation.updated_at_us)),
    };
    of_operation(
        operation,
        "dfa.cfa.v1.CfaRedeemedEvent",
        payload.encode_to_vec(),
    )
}

pub fn transferred(operation: &Operation) -> Event {
    let payload = pb::CfaTransferredEvent {
        context: context(&operation.correlation_id, &operation.user_id),
        operation_id: operation.operation_id.clone(),
        instrument_id: operation.instrument_id.clone(),
        from_user_id: operation.from_user_id.clone(),
        to_user_id: operation.to_user_id.clone(),
        amount: amount(operation),
        tx_hash: tx_hash(operation),
        transferred_at: Some(convert::to_timestamp_us(operation.updated_at_us)),
        trade_id: operation.trade_id.clone(),
    };
    of_operation(
        operation,
        "dfa.cfa.v1.CfaTransferredEvent",
        payload.encode_to_vec(),
    )
}

pub fn issuance_started(operation: &Operation) -> Event {
    let payload = pb::IssuanceStartedEvent {
        context: context(&operation.correlation_id, &operation.user_id),
        operation_id: operation.operation_id.clone(),
        user_id: operation.user_id.clone(),
        amount: amount(operation),
        tx_hash: tx_hash(operation),
        reason: String::new(),
        at: Some(convert::to_timestamp_us(operation.updated_at_us)),
    };
    of_operation(
        operation,
        "dfa.cfa.v1.IssuanceStartedEvent",
        payload.encode_to_vec(),
    )
}

pub fn issuance_failed(operation: &Operation, reason: &str) -> Event {
    let payload = pb::IssuanceFailedEvent {
        context: context(&operation.correlation_id, &operation.user_id),
        operation_id: operation.operation_id.clone(),
        user_id: operation.user_id.clone(),
        amount: amount(operation),
        tx_hash: tx_hash(operation),
        reason: reason.to_owned(),
        at: Some(convert::to_timestamp_us(operation.updated_at_us)),
    };
    of_operation(
        operation,
        "dfa.cfa.v1.IssuanceFailedEvent",
        payload.encode_to_vec(),
    )
}

pub fn redemption_failed(operation: &Operation, reason: &str) -> Event {
    let payload = pb::RedemptionFailedEvent {
        context: context(&operation.correlation_id, &operation.user_id),
        operation_id: operation.operation_id.clone(),
        user_id: operation.user_id.clone(),
        amount: amount(operation),
        tx_hash: tx_hash(operation),
        reason: reason.to_owned(),
        at: Some(convert::to_timestamp_us(operation.updated_at_us)),
    };
    of_operation(
        operation,
        "dfa.cfa.v1.RedemptionFailedEvent",
        payload.encode_to_vec(),
    )
}

pub fn instrument_registered(instrument: &Instrument, correlation_id: &str) -> Event {
    let payload = pb::InstrumentRegisteredEvent {
        context: context(correlation_id, &instrument.issuer_id),
        instrument_id: instrument.instrument_id.clone(),
        symbol: instrument.instrument_id.clone(),
        name: instrument.name.clone(),
        r#type: instrument.kind.code(),
        issuer_id: instrument.issuer_id.clone(),
        registered_at: Some(convert::to_timestamp_us(instrument.registered_at_us)),
        decimals: u32::from(instrument.decimals),
    };
    let type_name = "dfa.cfa.v1.InstrumentRegisteredEvent";
    let id = event_id(type_name, &instrument.instrument_id);
    event(
        topics::CFA,
        id,
        &instrument.instrument_id,
        type_name,
        correlation_id,
        instrument.updated_at_us,
        payload.encode_to_vec(),
    )
}

pub fn instrument_updated(instrument: &Instrument, correlation_id: &str) -> Event {
    let payload = pb::InstrumentUpdatedEvent {
        context: context(correlation_id, &instrument.issuer_id),
        instrument_id: instrument.instrument_id.clone(),
        updated_at: Some(convert::to_timestamp_us(instrument.updated_at_us)),
    };
    let type_name = "dfa.cfa.v1.InstrumentUpdatedEvent";
    event(
        topics::CFA,
        Uuid::now_v7(),
        &instrument.instrument_id,
        type_name,
        correlation_id,
        instrument.updated_at_us,
        payload.encode_to_vec(),
    )
}

/// The allow-list transaction of a user's address was submitted (6.5).
pub fn registration_requested(
    user_id: &str,
    tx_hash: &str,
    correlation_id: &str,
    at_us: i64,
) -> Event {
    let payload = ledger::UserOnchainRegistrationRequestedEvent {
        context: context(correlation_id, user_id),
        user_id: user_id.to_owned(),
        address: Address::of_user(user_id).to_string(),
        tx_hash: tx_hash.to_owned(),
        at: Some(convert::to_timestamp_us(at_us)),
    };
    let name = "dfa.ledger.v1.UserOnchainRegistrationRequestedEvent";
    of_user(
        user_id,
        name,
        correlation_id,
        at_us,
        payload.encode_to_vec(),
    )
}

/// The allow-list transaction was executed.
pub fn registration_confirmed(
    user_id: &str,
    tx_hash: &str,
    correlation_id: &str,
    at_us: i64,
) -> Event {
    let payload = ledger::UserOnchainRegistrationConfirmedEvent {
        context: context(correlation_id, user_id),
        user_id: user_id.to_owned(),
        address: Address::of_user(user_id).to_string(),
        tx_hash: tx_hash.to_owned(),
        at: Some(convert::to_timestamp_us(at_us)),
    };
    let name = "dfa.ledger.v1.UserOnchainRegistrationConfirmedEvent";
    of_user(
        user_id,
        name,
        correlation_id,
        at_us,
        payload.encode_to_vec(),
    )
}

fn of_user(
    user_id: &str,
    type_name: &str,
    correlation_id: &str,
    at_us: i64,
    payload: Vec<u8>,
) -> Event {
    let id = event_id(type_name, user_id);
    event(
        topics::LEDGER,
        id,
        user_id,
        type_name,
        correlation_id,
        at_us,
        payload,
    )
}

/// A placement has ended.
pub fn placement_closed(
    placement: &Placement,
    decimals: u8,
    reason: &str,
    correlation_id: &str,
    at_us: i64,
) -> Event {
    let id = &placement.instrument_id;
    let payload = pb::PlacementClosedEvent {
        context: context(correlation_id, ""),
        instrument_id: id.clone(),
        status: placement.status().code(),
        issued: Some(convert::to_monetary_amount_minor(
            id,
            placement.issued_minor,
            decimals,
        )),
        raised: Some(convert::to_monetary_amount_minor(
            CFA_RUB,
            placement.raised_minor,
            CFA_RUB_DECIMALS,
        )),
        reason: reason.to_owned(),
        at: Some(convert::to_timestamp_us(at_us)),
    };
    let type_name = "dfa.cfa.v1.PlacementClosedEvent";
    event(
        topics::CFA,
        event_id(type_name, id),
        id,
        type_name,
        correlation_id,
        at_us,
        payload.encode_to_vec(),
    )
}

/// Requests a push and an e-mail to a holder of a redeemed issue, or of a paid coupon
/// (specification 1.5).
pub fn notification(redemption: &IssueRedemption, operation: &Operation, at_us: i64) -> Event {
    let payload = pb::HolderNotificationEvent {
        context: context(&redemption.redemption_id, &operation.user_id),
        user_id: operation.user_id.clone(),
        instrument_id: redemption.instrument_id.clone(),
        redemption_id: redemption.redemption_id.clone(),
        amount: Some(convert::to_monetary_amount_minor(
            CFA_RUB,
            operation.payment_minor,
            CFA_RUB_DECIMALS,
        )),
        channels: vec!["push".into(), "email".into()],
        at: Some(convert::to_timestamp_us(at_us)),
        coupon_number: redemption.coupon_number,
    };
    of_operation(
        operation,
        "dfa.cfa.v1.HolderNotificationEvent",
        payload.encode_to_vec(),
    )
}

/// A freeze became active or was lifted, or a forced transfer ended.
pub fn enforcement(act: &EnforcementAct, decimals: u8) -> Event {
    let id = &act.instrument_id;
    let amount =
        (!act.is_whole()).then(|| convert::to_monetary_amount_minor(id, act.units_minor, decimals));
    let document = match act.status {
        ActStatus::Lifted => &act.lift_document,
        _ => &act.document,
    };
    let payload = pb::EnforcementActEvent {
        context: context(&act.correlation_id, &act.holder_id),
        act_id: act.act_id.clone(),
        instrument_id: id.clone(),
        holder_id: act.holder_id.clone(),
        to_user_id: act.to_user_id.clone(),
        amount,
        tx_hash: act.tx_hash.clone(),
        at: Some(convert::to_timestamp_us(act.updated_at_us)),
        kind: act.kind.as_str().to_owned(),
        basis: act.basis.as_str().to_owned(),
        status: act.status.as_str().to_owned(),
        document: document.clone(),
    };
    let type_name = "dfa.cfa.v1.EnforcementActEvent";
    // An act has one event per status.
    let of_status = format!("{type_name}:{}", act.status.as_str());
    event(
        topics::CFA,
        event_id(&of_status, &act.act_id),
        &act.act_id,
        type_name,
        &act.correlation_id,
        act.updated_at_us,
        payload.encode_to_vec(),
    )
}

/// An act as [`audit`] has built it, to be sealed.
pub struct Draft {
    pub at_us: i64,
    correlation_id: String,
    record: audit::AuditRecordEvent,
}

impl Draft {
    /// The act. It has no request id: the correlation id names the request.
    pub fn act(&self) -> Act<'_> {
        let record = &self.record;
        Act {
            action: &record.action,
            actor: &record.actor,
            object_id: &record.object_id,
            before: &record.before,
            after: &record.after,
            reason: &record.reason,
            request_id: "",
            correlation_id: &self.correlation_id,
        }
    }
}

/// Whether [`audit`] has built the event.
pub fn is_draft(event: &Event) -> bool {
    event.topic == topics::AUDIT
}

/// The act of an event that [`audit`] has built; `None` for other events.
///
/// # Panics
/// The event is an audit record of another encoding.
pub fn draft(event: &Event) -> Option<Draft> {
    is_draft(event).then(|| Draft {
        at_us: event.occurred_at_us,
        correlation_id: event.correlation_id.clone(),
        record: audit::AuditRecordEvent::decode(&*event.payload).expect("built by `audit`"),
    })
}

/// Content of the event of a sealed record.
pub fn sealed(service: &str, record_id: &str, record: &AuditRecord<'_>) -> Vec<u8> {
    let act = record.act;
    let payload = audit::AuditRecordEvent {
        context: context(act.correlation_id, act.actor),
        record_id: record_id.to_owned(),
        service: service.to_owned(),
        action: act.action.to_owned(),
        actor: act.actor.to_owned(),
        object_id: act.object_id.to_owned(),
        before: act.before.to_owned(),
        after: act.after.to_owned(),
        reason: act.reason.to_owned(),
        at: Some(convert::to_timestamp_us(record.at_us)),
    };
    payload.encode_to_vec()
}

/// Builds an audit record, which the repo seals when it is published. `action` is for example
/// `issuance.rejected`; `before` and `after` are states of the object.
pub fn audit(
    action: &str,
    object_id: &str,
    actor: &str,
    before: &str,
    after: &str,
    reason: &str,
    correlation_id: &str,
    at_us: i64,
) -> Event {
    let record = AuditRecord {
        // Set when it is sealed, as the id.
        sequence: 0,
        at_us,
        act: Act {
            action,
            actor,
            object_id,
            before,
            after,
            reason,
            request_id: "",
            correlation_id,
        },
    };
    event(
        topics::AUDIT,
        Uuid::nil(),
        object_id,
        "dfa.audit.v1.AuditRecordEvent",
        correlation_id,
        at_us,
        sealed(SOURCE, "", &record),
    )
}

/// Audit record of a call that stores an operation, by its caller (`design.md` 10).
pub fn audit_request(operation: &Operation, action: &str, caller: &str) -> Event {
    let before = match operation.status {
        Status::Rejected => Status::Created.as_str(),
        _ => "",
    };
    audit_operation(operation, action, before, caller)
}

/// Audit record of an operation's end, which the service causes.
pub fn audit_end(operation: &Operation, action: &str, before: &str) -> Event {
    audit_operation(operation, action, before, SOURCE)
}

fn audit_operation(operation: &Operation, action: &str, before: &str, actor: &str) -> Event {
    let reason = operation
        .rejection
        .as_ref()
        .map(|(_, message)| message.as_str())
        .unwrap_or_default();
    let status = operation.status.as_str();
    let is_issue = matches!(
        operation.flow,
        Flow::IssueRub | Flow::IssueInvestment | Flow::Placement
    );
    // The actor of a refused issue is not the user (R045).
    let after = match is_issue && operation.rejection.is_some() {
        true => format!("{status} for {}", operation.user_id),
        false => status.to_owned(),
    };
    audit(
        action,
        &operation.operation_id,
        actor,
        before,
        &after,
        reason,
        &operation.correlation_id,
        operation.updated_at_us,
    )
}
