//! Properties of the descriptors: field numbers, JSON names, types, enumerations.

use prost_reflect::{DescriptorPool, FieldDescriptor, Kind, MessageDescriptor};
use tests::wire::{methods, pool};

const CONTEXT: &str = "dfa.common.v1.RequestContext";

fn message(pool: &DescriptorPool, name: &str) -> MessageDescriptor {
    pool.get_message_by_name(name)
        .unwrap_or_else(|| panic!("no message {name}"))
}

/// Type of a field as in the schema, without the packages of common and well-known types.
fn kind(field: &FieldDescriptor) -> String {
    let kind = match field.kind() {
        Kind::Message(message) => message.full_name().to_owned(),
        Kind::Enum(values) => values.full_name().to_owned(),
        other => format!("{other:?}").to_lowercase(),
    };
    let kind = kind
        .replace("dfa.common.v1.", "")
        .replace("google.protobuf.", "");
    if field.is_list() {
        format!("repeated {kind}")
    } else {
        kind
    }
}

/// Asserts number, name and type of fields of a message, and that JSON names are in lower camel
/// case.
#[track_caller]
fn assert_fields(name: &str, fields: &[(u32, &str, &str)]) {
    let message = message(&pool(), name);
    for (number, field_name, wanted) in fields {
        let field = message
            .get_field(*number)
            .unwrap_or_else(|| panic!("{name} has no field {number}"));
        assert_eq!(
            (field.name(), kind(&field).as_str()),
            (*field_name, *wanted),
            "{name} field {number}"
        );
        assert_eq!(
            field.json_name(),
            camel(field_name),
            "{name} field {number}"
        );
    }
}

fn camel(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |text, word| {
        text + &word[..1].to_uppercase() + &word[1..]
    })
}

/// Asserts that the enumeration starts with `<prefix>UNSPECIFIED` = 0 and has these names, given
/// without the prefix.
#[track_caller]
fn assert_values(name: &str, prefix: &str, wanted: &[&str]) {
    let pool = pool();
    let descriptor = pool
        .get_enum_by_name(name)
        .unwrap_or_else(|| panic!("no enumeration {name}"));
    let mut all: Vec<(i32, String)> = descriptor
        .values()
        .map(|value| (value.number(), value.name().to_owned()))
        .collect();
    all.sort();
    assert_eq!(all[0], (0, format!("{prefix}UNSPECIFIED")));
    let names: Vec<&str> = all[1..]
        .iter()
        .map(|(_, name)| name.strip_prefix(prefix).expect("the prefix"))
        .collect();
    for wanted in wanted {
        assert!(names.contains(wanted), "{name} has no {wanted}: {names:?}");
    }
}

#[test]
fn r002_every_request_has_the_context_as_field_one() {
    let pool = pool();
    let methods = methods(&pool);
    assert!(
        methods.len() > 80,
        "the contract has {} calls",
        methods.len()
    );
    for method in methods {
        let request = method.input();
        let field = request
            .get_field(1)
            .unwrap_or_else(|| panic!("{} has no field 1", request.full_name()));
        assert_eq!(field.name(), "context", "{}", request.full_name());
        assert_eq!(
            field.kind().as_message().expect("a message").full_name(),
            CONTEXT,
            "{}",
            request.full_name()
        );
    }
}

// rows: R003 R004 R005 R310
#[test]
fn r003_the_context_has_its_ids() {
    assert_fields(
        CONTEXT,
        &[
            (1, "request_id", "string"),
            (2, "correlation_id", "string"),
            (3, "idempotency_key", "string"),
            (4, "user_id", "string"),
            (5, "trace_id", "string"),
            (6, "occurred_at", "Timestamp"),
            (7, "source", "string"),
        ],
    );
    assert_eq!(camel("request_id"), "requestId");
}

#[test]
fn r006_every_event_has_the_context_as_field_one() {
    let pool = pool();
    let events: Vec<MessageDescriptor> = pool
        .all_messages()
        .filter(|message| {
            message.full_name().starts_with("dfa.") && message.name().ends_with("Event")
        })
        .collect();
    assert!(
        events.len() >= 30,
        "the contract has {} events",
        events.len()
    );
    for event in events {
        let field = event
            .get_field(1)
            .unwrap_or_else(|| panic!("{} has no field 1", event.full_name()));
        assert_eq!(field.name(), "context", "{}", event.full_name());
        assert_eq!(
            field.kind().as_message().expect("a message").full_name(),
            CONTEXT,
            "{}",
            event.full_name()
        );
    }
}

// rows: R007 R311
#[test]
fn r007_money_is_a_code_and_a_decimal_text() {
    assert_fields("dfa.common.v1.Decimal", &[(1, "value", "string")]);
    for name in ["dfa.common.v1.Money", "dfa.common.v1.MonetaryAmount"] {
        assert_fields(
            name,
            &[(1, "currency_code", "string"), (2, "amount", "Decimal")],
        );
    }
    // The contract has no binary float.
    for message in pool()
        .all_messages()
        .filter(|message| message.full_name().starts_with("dfa."))
    {
        for field in message.fields() {
            assert!(
                !matches!(field.kind(), Kind::Float | Kind::Double),
                "{}",
                field.full_name()
            );
        }
    }
}

#[test]
fn r008_a_fee_has_a_type_and_an_amount() {
    assert_fields(
        "dfa.common.v1.Fee",
        &[(1, "fee_type", "string"), (2, "amount", "Money")],
    );
    assert_fields("dfa.market.v1.Trade", &[(7, "fee", "Fee")]);
}

// rows: R009 R311
#[test]
fn r009_prices_quantities_and_balances_are_decimals() {
    let wanted = [
        "price",
        "quantity",
        "balance",
        "filled_quantity",
        "average_price",
        "tick_size",
        "lot_size",
    ];
    let mut found = 0;
    for message in pool()
        .all_messages()
        .filter(|message| message.full_name().starts_with("dfa."))
    {
        for field in message
            .fields()
            .filter(|field| wanted.contains(&field.name()))
        {
            let kind = kind(&field);
            assert!(
                kind == "Decimal" || kind == "Money",
                "{} is a {kind}",
                field.full_name()
            );
            found += 1;
        }
    }
    assert!(found > 15, "{found}");
}

// rows: R010 R312
#[test]
fn r010_every_list_call_is_paged() {
    let pool = pool();
    let lists: Vec<_> = methods(&pool)
        .into_iter()
        .filter(|method| method.name().starts_with("List"))
        .collect();
    for name in [
        "ListHolders",
        "ListOrders",
        "ListTrades",
        "ListAccounts",
        "ListOperations",
    ] {
        assert!(
            lists.iter().any(|method| method.name() == name),
            "no {name}"
        );
    }
    for method in lists {
        let field = |message: MessageDescriptor| {
            let field = message
                .get_field_by_name("pagination")
                .unwrap_or_else(|| panic!("{}", message.full_name()));
            kind(&field)
        };
        assert_eq!(
            field(method.input()),
            "PaginationRequest",
            "{}",
            method.full_name()
        );
        assert_eq!(
            field(method.output()),
            "PaginationResponse",
            "{}",
            method.full_name()
        );
    }
    assert_fields(
        "dfa.common.v1.PaginationRequest",
        &[(1, "page_size", "int32"), (2, "page_token", "string")],
    );
    assert_fields(
        "dfa.common.v1.PaginationResponse",
        &[(1, "next_page_token", "string"), (2, "total_size", "int64")],
    );
}

// rows: R011 R012 R013 R014 R316
#[test]
fn r316_enumerations_hold_the_values_of_the_text_and_of_the_decision() {
    assert_values(
        "dfa.common.v1.InstrumentType",
        "INSTRUMENT_TYPE_",
        &[
            "CFA_BOND",
            "MONEY_CLAIM",
            "CFA_EQUITY",
            "CFA_COMMODITY",
            "CFA_HYBRID",
        ],
    );
    assert_values(
        "dfa.common.v1.LimitType",
        "LIMIT_TYPE_",
        // INVESTMENT is an addition (F35).
        &["DEPOSIT", "WITHDRAWAL", "TRADING", "INVESTMENT"],
    );
    assert_values(
        "dfa.common.v1.HashAlgorithm",
        "HASH_ALGORITHM_",
        &["KECCAK256", "SHA256", "STREEBOG256"],
    );
    assert_values(
        "dfa.common.v1.RejectionReasonCode",
        "REJECTION_REASON_CODE_",
        &[
            "KYC_REQUIRED",
            "LIMIT_EXCEEDED",
            "INTEGRATION_ERROR",
            "SANCTIONS_HIT",
            "AML_BLOCKED",
            "INSUFFICIENT_BALANCE",
            "ISSUE_LIMIT_EXCEEDED",
            "INSTRUMENT_NOT_ACTIVE",
        ],
    );
    assert_values(
        "dfa.common.v1.PaymentStatus",
        "PAYMENT_STATUS_",
        &["PENDING", "SUCCESS", "FAILED", "EXPIRED", "REFUNDED"],
    );
}

// rows: R144
#[test]
fn r144_orders_have_the_enumerations_of_the_text() {
    assert_values("dfa.market.v1.OrderSide", "ORDER_SIDE_", &["BUY", "SELL"]);
    assert_values(
        "dfa.market.v1.OrderType",
        "ORDER_TYPE_",
        &["LIMIT", "MARKET"],
    );
    assert_values(
        "dfa.market.v1.TimeInForce",
        "TIME_IN_FORCE_",
        &["GTC", "IOC", "FOK"],
    );
    assert_values(
        "dfa.market.v1.OrderStatus",
        "ORDER_STATUS_",
        &[
            "OPEN",
            "PARTIALLY_FILLED",
            "FILLED",
            "CANCELLED",
            "REJECTED",
        ],
    );
}

// rows: R015 R316
#[test]
fn r015_kyc_levels_are_numbered_in_their_order() {
    let pool = pool();
    let levels = pool
        .get_enum_by_name("dfa.common.v1.KycStatus")
        .expect("KycStatus");
    let number = |name: &str| {
        levels
            .get_value_by_name(&format!("KYC_STATUS_{name}"))
            .expect(name)
            .number()
    };
    let order = ["NONE", "SIMPLIFIED", "STANDARD", "ENHANCED"].map(number);
    assert!(order.is_sorted_by(|a, b| a < b), "{order:?}");
}

// rows: R016 R317
#[test]
fn r317_the_user_profile_has_its_fields() {
    assert_fields(
        "dfa.identity.v1.UserProfile",
        &[
            (1, "user_id", "string"),
            (2, "kyc_status", "KycStatus"),
            (3, "bank_account", "string"),
            (4, "status", "dfa.identity.v1.UserStatus"),
            (5, "qualified_investor", "bool"),
            (6, "onchain_address", "string"),
            (7, "full_name_hash", "string"),
            (8, "created_at", "Timestamp"),
        ],
    );
    assert_values(
        "dfa.identity.v1.UserStatus",
        "USER_STATUS_",
        &["ACTIVE", "BLOCKED"],
    );
}

#[test]
fn r313_a_holder_balance_has_its_fields() {
    assert_fields(
        "dfa.cfa.v1.HolderBalance",
        &[
            (1, "user_id", "string"),
            (2, "address", "string"),
            (3, "balance", "Decimal"),
            (4, "locked", "Decimal"),
            (5, "share_percent", "Decimal"),
            (6, "as_of_block", "uint64"),
            (7, "updated_at", "Timestamp"),
        ],
    );
    assert_fields(
        "dfa.cfa.v1.ListHoldersRequest",
        &[(4, "as_of", "Timestamp")],
    );
}

#[test]
fn r314_a_cfa_operation_has_its_fields() {
    assert_fields(
        "dfa.cfa.v1.CfaOperation",
        &[
            (1, "operation_id", "string"),
            (2, "type", "OperationType"),
            (3, "status", "OperationStatus"),
            (4, "user_id", "string"),
            (5, "hold_id", "string"),
            (6, "amount", "Decimal"),
            (7, "currency_code", "string"),
            (8, "idempotency_key", "string"),
            (9, "external_ref", "string"),
            (10, "onchain_tx_hash", "string"),
            (11, "rejection_reason", "RejectionReasonCode"),
            (12, "rejection_message", "string"),
            (13, "finalized_at", "Timestamp"),
            (14, "instrument_id", "string"),
            (15, "from_user_id", "string"),
            (16, "to_user_id", "string"),
            (17, "trade_id", "string"),
            (18, "bookbuilding_id", "string"),
            (19, "created_at", "Timestamp"),
            (20, "updated_at", "Timestamp"),
            (21, "block_number", "uint64"),
            (22, "attempts", "uint32"),
        ],
    );
}

#[test]
fn r315_an_instrument_has_its_fields() {
    assert_fields(
        "dfa.cfa.v1.Instrument",
        &[
            (1, "instrument_id", "string"),
            (2, "symbol", "string"),
            (3, "name", "string"),
            (4, "type", "InstrumentType"),
            (5, "decimals", "uint32"),
            (6, "issuer_id", "string"),
            (7, "smart_contract_address", "string"),
            (8, "currency_code", "string"),
            (9, "status", "dfa.cfa.v1.InstrumentStatus"),
            (10, "issue_limit", "Decimal"),
            (11, "issued", "Decimal"),
            (12, "nominal", "Decimal"),
            (13, "coupons", "repeated dfa.cfa.v1.Coupon"),
            (14, "issued_at", "Timestamp"),
            (15, "matures_at", "Timestamp"),
            (16, "tick_size", "Decimal"),
            (17, "lot_size", "Decimal"),
            (18, "price_band_low", "Decimal"),
            (19, "price_band_high", "Decimal"),
            (20, "document_hash", "string"),
            (21, "document_uri", "string"),
        ],
    );
    assert_values(
        "dfa.cfa.v1.InstrumentStatus",
        "INSTRUMENT_STATUS_",
        &["DRAFT", "ACTIVE", "HALTED", "MATURED", "REDEEMED"],
    );
    let pool = pool();
    let service = pool
        .get_service_by_name("dfa.cfa.v1.CfaRegistryService")
        .expect("the service");
    for name in ["GetInstrument", "ListInstruments", "UpdateInstrument"] {
        assert!(
            service.methods().any(|method| method.name() == name),
            "no {name}"
        );
    }
}

#[test]
fn r318_initiate_payout_answers_the_stored_payout() {
    assert_fields(
        "dfa.payments.v1.InitiatePayoutResponse",
        &[(1, "payout", "dfa.payments.v1.Payout")],
    );
    assert_fields(
        "dfa.payments.v1.Payout",
        &[
            (1, "payout_id", "string"),
            (2, "user_id", "string"),
            (3, "amount", "Money"),
            (4, "bank_account", "string"),
            (5, "status", "PaymentStatus"),
        ],
    );
}

// rows: R017
#[test]
fn r017_the_contract_still_has_everything_of_the_committed_image() {
    let image = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/baseline.binpb");
    let image = DescriptorPool::decode(&*std::fs::read(image).expect("the image is readable"))
        .expect("the image decodes");
    let now = pool();
    assert_eq!(removed(&image, &now), Vec::<String>::new());

    // The comparison detects a removed field.
    let mut files = now.file_descriptor_protos().cloned().collect::<Vec<_>>();
    let file = files
        .iter_mut()
        .find(|file| file.package() == "dfa.common.v1")
        .expect("common");
    let message = file
        .message_type
        .iter_mut()
        .find(|message| message.name() == "Money")
        .expect("Money");
    message
        .field
        .retain(|field| field.name() != "currency_code");
    let mut copy = DescriptorPool::new();
    copy.add_file_descriptor_protos(files)
        .expect("a smaller contract");
    assert_eq!(removed(&now, &copy), ["dfa.common.v1.Money.currency_code"]);
}

/// Fields, enumeration values and methods of `old` that `new` lacks or has under another name,
/// number or type.
fn removed(old: &DescriptorPool, new: &DescriptorPool) -> Vec<String> {
    let mut lost = Vec::new();
    for message in old
        .all_messages()
        .filter(|message| message.full_name().starts_with("dfa."))
    {
        let twin = new.get_message_by_name(message.full_name());
        for field in message.fields() {
            let same = twin
                .as_ref()
                .and_then(|twin| twin.get_field(field.number()))
                .is_some_and(|other| other.name() == field.name() && kind(&other) == kind(&field));
            if !same {
                lost.push(field.full_name().to_owned());
            }
        }
    }
    for values in old
        .all_enums()
        .filter(|values| values.full_name().starts_with("dfa."))
    {
        let twin = new.get_enum_by_name(values.full_name());
        for value in values.values() {
            let same = twin
                .as_ref()
                .and_then(|twin| twin.get_value(value.number()));
            if same.is_none_or(|other| other.name() != value.name()) {
                lost.push(value.full_name().to_owned());
            }
        }
    }
    let known: Vec<String> = methods(new)
        .iter()
        .map(|method| method.full_name().to_owned())
        .collect();
    lost.extend(
        methods(old)
            .iter()
            .map(|method| method.full_name().to_owned())
            .filter(|name| !known.contains(name)),
    );
    lost
}
