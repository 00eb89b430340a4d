//! The specification's statements about schemas, checked on the compiled descriptors.

use prost_reflect::{DescriptorPool, MessageDescriptor};
use rpc::contract::Contract;

fn message(name: &str) -> MessageDescriptor {
    Contract::platform()
        .pool()
        .get_message_by_name(name)
        .unwrap_or_else(|| panic!("{name} is not in the contract"))
}

fn pool() -> DescriptorPool {
    Contract::platform().pool().clone()
}

/// `name: type` of the fields, ordered by number.
fn fields(name: &str) -> Vec<String> {
    let mut fields: Vec<_> = message(name).fields().collect();
    fields.sort_by_key(|field| field.number());
    fields
        .iter()
        .enumerate()
        .map(|(index, field)| {
            assert_eq!(
                field.number() as usize,
                index + 1,
                "{name} skips a field number"
            );
            let kind = format!("{:?}", field.kind());
            let kind = match field.kind() {
                prost_reflect::Kind::Message(message) => message.name().to_owned(),
                prost_reflect::Kind::Enum(kind) => kind.name().to_owned(),
                _ => kind.to_lowercase(),
            };
            format!("{}: {kind}", field.name())
        })
        .collect()
}

/// Asserts that the message begins with these fields; further ones may follow.
fn begins(name: &str, wanted: &str) {
    let actual = fields(name);
    let wanted: Vec<&str> = wanted.split(", ").collect();
    assert!(actual.len() >= wanted.len(), "{name}: {actual:?}");
    assert_eq!(actual[..wanted.len()], wanted, "{name}");
}

// rows: R002
#[test]
fn r002_every_request_has_the_context_as_field_one() {
    let mut checked = 0;
    for service in pool().services() {
        for method in service.methods() {
            let first = method.input().get_field(1);
            let first = first.unwrap_or_else(|| panic!("{} has no field 1", method.full_name()));
            assert_eq!(first.name(), "context", "{}", method.full_name());
            assert!(
                matches!(
                    first.kind(),
                    prost_reflect::Kind::Message(m) if m.full_name() == "dfa.common.v1.RequestContext"
                ),
                "{}",
                method.full_name()
            );
            checked += 1;
        }
    }
    assert!(checked > 50, "only {checked} methods");
}

// rows: R003 R004 R005
#[test]
fn r003_the_context_has_its_ids_with_their_json_names() {
    let context = message("dfa.common.v1.RequestContext");
    let names: Vec<_> = (1..=3)
        .map(|number| context.get_field(number).unwrap().json_name().to_owned())
        .collect();
    assert_eq!(names, ["requestId", "correlationId", "idempotencyKey"]);
}

// rows: R006
#[test]
fn r006_every_event_has_the_context_as_field_one() {
    let events: Vec<_> = pool()
        .all_messages()
        .filter(|message| {
            message.package_name().starts_with("dfa.") && message.name().ends_with("Event")
        })
        .collect();
    assert!(events.len() > 25, "only {} events", events.len());
    for event in events {
        let first = event.get_field(1);
        assert_eq!(
            first.as_ref().map(|field| field.name()),
            Some("context"),
            "{}",
            event.full_name()
        );
    }
}

// rows: R007 R008 R009
#[test]
fn r007_money_is_a_currency_and_a_decimal_text() {
    for name in ["dfa.common.v1.Money", "dfa.common.v1.MonetaryAmount"] {
        assert_eq!(fields(name), ["currency_code: string", "amount: Decimal"]);
    }
    assert_eq!(fields("dfa.common.v1.Decimal"), ["value: string"]);
    assert_eq!(
        fields("dfa.common.v1.Fee"),
        ["fee_type: string", "amount: Money"]
    );
    let floats: Vec<_> = pool()
        .all_messages()
        .filter(|message| message.package_name().starts_with("dfa."))
        .flat_map(|message| message.fields().collect::<Vec<_>>())
        .filter(|field| {
            matches!(
                field.kind(),
                prost_reflect::Kind::Double | prost_reflect::Kind::Float
            )
        })
        .map(|field| field.full_name().to_owned())
        .collect();
    assert!(
        floats.is_empty(),
        "binary floats in the contract: {floats:?}"
    );
}

// rows: R010
#[test]
fn r010_every_list_is_paged() {
    let mut lists = 0;
    for service in pool().services() {
        for method in service
            .methods()
            .filter(|method| method.name().starts_with("List"))
        {
            assert!(
                method.input().get_field_by_name("pagination").is_some(),
                "{}",
                method.full_name()
            );
            assert!(
                method.output().get_field_by_name("pagination").is_some(),
                "{}",
                method.full_name()
            );
            lists += 1;
        }
    }
    assert!(lists >= 5);
}

// rows: R244
#[test]
fn r244_cfa_events_have_their_fields_in_order() {
    let tail = "amount: MonetaryAmount, tx_hash: string";
    let head = "context: RequestContext, operation_id: string, instrument_id: string";
    begins(
        "dfa.cfa.v1.CfaIssuedEvent",
        &format!("{head}, holder_id: string, {tail}, issued_at: Timestamp"),
    );
    begins(
        "dfa.cfa.v1.CfaRedeemedEvent",
        &format!("{head}, holder_id: string, {tail}, redeemed_at: Timestamp"),
    );
    begins(
        "dfa.cfa.v1.CfaTransferredEvent",
        &format!(
            "{head}, from_user_id: string, to_user_id: string, {tail}, transferred_at: Timestamp"
        ),
    );
    begins(
        "dfa.cfa.v1.InstrumentRegisteredEvent",
        "context: RequestContext, instrument_id: string, symbol: string, name: string, type: InstrumentType, \
         issuer_id: string, registered_at: Timestamp",
    );
}

// rows: R245
#[test]
fn r245_payment_events_have_their_fields_in_order() {
    begins(
        "dfa.payments.v1.FiatDepositedEvent",
        "context: RequestContext, user_id: string, amount: Money, payment_id: string, deposited_at: Timestamp",
    );
    begins(
        "dfa.payments.v1.PayoutConfirmedEvent",
        "context: RequestContext, user_id: string, amount: Money, payout_id: string, confirmed_at: Timestamp",
    );
    begins(
        "dfa.payments.v1.PaymentIntentCreatedEvent",
        "context: RequestContext, payment_id: string, user_id: string, amount: Money, \
         method: PaymentMethod, at: Timestamp",
    );
}

// rows: R246
#[test]
fn r246_market_events_have_their_fields_in_order() {
    begins(
        "dfa.market.v1.OrderPlacedEvent",
        "context: RequestContext, order_id: string, user_id: string, instrument_id: string, side: OrderSide, \
         type: OrderType, price: Decimal, quantity: Decimal, placed_at: Timestamp",
    );
    begins(
        "dfa.market.v1.TradeExecutedEvent",
        "context: RequestContext, trade_id: string, buyer_id: string, seller_id: string, instrument_id: string, \
         quantity: Decimal, price: Decimal, fee: Fee, executed_at: Timestamp",
    );
    begins(
        "dfa.market.v1.OrderCancelledEvent",
        "context: RequestContext, order_id: string, reason: string, cancelled_at: Timestamp",
    );
}

// rows: R247
#[test]
fn r247_ledger_events_have_their_names_and_fields() {
    begins(
        "dfa.ledger.v1.OperationCreatedEvent",
        "context: RequestContext, operation_id: string, type: OperationType, user_id: string, amount: MonetaryAmount, \
         created_at: Timestamp",
    );
    begins(
        "dfa.ledger.v1.BalanceUpdatedEvent",
        "context: RequestContext, subaccount_id: string, old_balance: Decimal, new_balance: Decimal, \
         operation_id: string, updated_at: Timestamp",
    );
    begins(
        "dfa.ledger.v1.HoldCreatedEvent",
        "context: RequestContext, hold_id: string, subaccount_id: string, amount: MonetaryAmount, reason: string, \
         created_at: Timestamp",
    );
    begins(
        "dfa.ledger.v1.HoldReleasedEvent",
        "context: RequestContext, hold_id: string, reason: string, released_at: Timestamp",
    );
    begins(
        "dfa.ledger.v1.HoldConsumedEvent",
        "context: RequestContext, hold_id: string, consumed_at: Timestamp",
    );
    begins(
        "dfa.ledger.v1.OperationStatusChangedEvent",
        "context: RequestContext, operation_id: string, old_status: OperationStatus, new_status: OperationStatus, \
         reason: string, changed_at: Timestamp",
    );
    for name in [
        "UserOnchainRegistrationRequestedEvent",
        "UserOnchainRegistrationConfirmedEvent",
    ] {
        begins(
            &format!("dfa.ledger.v1.{name}"),
            "context: RequestContext, user_id: string, address: string, tx_hash: string, at: Timestamp",
        );
    }
    assert!(
        pool()
            .get_message_by_name("dfa.ledger.v1.PostingCreatedEvent")
            .is_some()
    );
}
