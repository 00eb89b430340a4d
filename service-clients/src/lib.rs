//! Room `service-clients`: typed clients of the platform's services, with one call policy.
//!
//! | file | contents |
//! |---|---|
//! | `policy` | deadlines, retries, and the error of a failed call ([`CallError`]) |
//! | `convert` | numbers and amounts from messages |
//! | `withdrawal` | operations that leave a batch because the ledger refuses them |
//! | `ledger`, `cfa`, `identity`, `payments`, `market`, `chain` | one client per service |
//! | `audit` | the last audit record of any service |
//!
//! Architecture invariants: no service is a dependency, and no generated message is public. A write
//! is repeated only as the same message, with the same idempotency key.

mod audit;
pub mod cfa;
mod chain;
mod convert;
pub mod identity;
pub mod ledger;
mod market;
mod payments;
mod policy;
mod withdrawal;

pub use audit::{AuditClient, AuditedService};
pub use cfa::CfaClient;
pub use chain::ChainClient;
pub use identity::IdentityClient;
pub use ledger::LedgerClient;
pub use market::{MarketClient, TradingHold};
pub use payments::PaymentsClient;
pub use policy::{Answer, CallError, Policy, caused_by};
pub use types::{HoldStatus, LimitType, OperationStatus, OperationType, PaymentStatus};

#[cfg(test)]
mod tests {
    use proto::{common::v1 as common, ledger::v1 as ledger};

    /// The enums of `types` have the codes and names of the contract, and no others.
    #[test]
    fn types_and_states_are_those_of_the_contract() {
        macro_rules! same {
            ($($contract:ident::$name:ident $prefix:literal)+) => {
                $(for code in 1..100 {
                    let known = $contract::$name::try_from(code).ok();
                    let name = known.map(|known| known.as_str_name());
                    let name = name.and_then(|name| name.strip_prefix($prefix));
                    let ours = super::$name::from_code(code).map(super::$name::as_str);
                    assert_eq!(ours, name, "{} {code}", stringify!($name));
                })+
            };
        }
        same! {
            common::OperationType "OPERATION_TYPE_"
            common::OperationStatus "OPERATION_STATUS_"
            common::PaymentStatus "PAYMENT_STATUS_"
            common::LimitType "LIMIT_TYPE_"
            ledger::HoldStatus "HOLD_STATUS_"
        }
    }
}
