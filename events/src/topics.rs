//! Topic names (specification 6.1; rows R238 to R243). Keys by topic: D25.

/// Key: operation id, or instrument id for `InstrumentRegistered`.
pub const CFA: &str = "platform.cfa.events.v1";
/// Key: payment id or payout id.
pub const PAYMENTS: &str = "platform.payments.events.v1";
/// Key: instrument id.
pub const MARKET: &str = "platform.market.events.v1";
/// Key: sub-account id for holds and balances, otherwise operation id.
pub const LEDGER: &str = "platform.ledger.events.v1";
/// Key: user id.
pub const IDENTITY: &str = "platform.identity.events.v1";
/// Key: transaction hash or block number.
pub const CHAIN: &str = "platform.chain.events.v1";
/// Key: subject of the audited action (D34).
pub const AUDIT: &str = "platform.audit.events.v1";

/// Every topic of the platform, without dead-letter topics.
pub const ALL: [&str; 7] = [CFA, PAYMENTS, MARKET, LEDGER, IDENTITY, CHAIN, AUDIT];

/// Partitions of a topic on Kafka (D25).
pub const PARTITIONS: i32 = 12;

/// Dead-letter topic of a topic (D26).
pub fn dlq(topic: &str) -> String {
    format!("{topic}.dlq")
}

/// Whether it is a dead-letter topic.
pub fn is_dlq(topic: &str) -> bool {
    topic.ends_with(".dlq")
}

/// The topic of a dead-letter topic.
pub fn of_dlq(dlq: &str) -> &str {
    dlq.strip_suffix(".dlq").unwrap_or(dlq)
}
