//! Fields of payment messages and of events, checked on the compiled descriptors.

use prost_reflect::{DescriptorPool, FieldDescriptor, Kind, MessageDescriptor};
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
            format!("{}: {}", field.name(), kind(field))
        })
        .collect()
}

fn kind(field: &FieldDescriptor) -> String {
    match field.kind() {
        Kind::Message(message) => message.name().to_owned(),
        Kind::Enum(kind) => kind.name().to_owned(),
        scalar => format!("{scalar:?}").to_lowercase(),
    }
}

/// Asserts that the message begins with these fields; further ones may follow.
fn begins(name: &str, wanted: &str) {
    let actual = fields(name);
    let wanted: Vec<&str> = wanted.split(", ").collect();
    assert!(actual.len() >= wanted.len(), "{name}: {actual:?}");
    assert_eq!(actual[..wanted.len()], wanted, "{name}");
}

/// Number, name and type of every field of the platform's only message with this name.
fn layout(name: &str) -> Vec<(u32, String)> {
    let pool = pool();
    let of_name = |message: &MessageDescriptor| {
        message.full_name().starts_with("dfa.") && message.name() == name
    };
    let found: Vec<_> = pool.all_messages().filter(of_name).collect();
    assert_eq!(found.len(), 1, "layouts of {name}");
    let fields = found[0].fields();
    let mut fields: Vec<_> = fields
        .map(|field| {
            (
                field.number(),
                format!("{}: {}", field.name(), kind(&field)),
            )
        })
        .collect();
    fields.sort();
    fields
}

/// The messages that have this field.
fn with_field(field: &str) -> Vec<String> {
    let pool = pool();
    let has = |message: &MessageDescriptor| message.get_field_by_name(field).is_some();
    let found = pool.all_messages().filter(has);
    found
        .map(|message| message.full_name().to_owned())
        .collect()
}

// rows: R121 R122
#[test]
fn r122_webhook_and_report_have_one_layout_with_received_at_and_notes() {
    let owned = |fields: &[(u32, &str)]| -> Vec<(u32, String)> {
        let fields = fields.iter();
        fields
            .map(|(number, field)| (*number, (*field).to_owned()))
            .collect()
    };
    let webhook = owned(&[
        (1, "payment_id: string"),
        (2, "status: PaymentStatus"),
        (3, "amount: Money"),
        (4, "provider_payload: string"),
        (5, "received_at: Timestamp"),
    ]);
    assert_eq!(layout("PaymentWebhook"), webhook);
    let mut report = layout("ReconcileReport");
    // Further fields begin at 10.
    report.retain(|(number, _)| *number < 10);
    let wanted = owned(&[
        (1, "report_id: string"),
        (2, "business_date: Timestamp"),
        (3, "bank_balance: Money"),
        (4, "token_supply: Money"),
        (5, "balanced: bool"),
        (6, "notes: string"),
    ]);
    assert_eq!(report, wanted);
    // No other message is a second layout under another name.
    let package = "dfa.payments.v1";
    let only = |message: &str| vec![format!("{package}.{message}")];
    assert_eq!(with_field("provider_payload"), only("PaymentWebhook"));
    assert_eq!(with_field("token_supply"), only("ReconcileReport"));
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
    begins(
        "dfa.ledger.v1.PostingCreatedEvent",
        "context: RequestContext, posting_id: string, operation_id: string, \
         debit_subaccount_id: string, credit_subaccount_id: string, amount: MonetaryAmount, \
         created_at: Timestamp",
    );
}
