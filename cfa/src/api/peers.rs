//! The services this one asks: identity, ledger, payments, market. Wire shapes end here.
//!
//! A peer that is away (or too slow) is `Error::Unavailable`: the caller's step is repeated later
//! with the same idempotency key. A peer's refusal is `Error::Peer` with its reason and its exact
//! words.

use proto::common::v1 as common;
use proto::convert;
use proto::identity::v1 as identity;
use proto::identity::v1::identity_service_client::IdentityServiceClient;
use proto::ledger::v1 as ledger;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use proto::market::v1 as market;
use proto::market::v1::market_service_client::MarketServiceClient;
use proto::payments::v1 as payments;
use proto::payments::v1::payments_service_client::PaymentsServiceClient;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use types::Decimal;

use crate::error::{Error, Refusal};
use crate::model::{CFA_RUB, CFA_RUB_DECIMALS, Kind};

const LEDGER: &str = "Ledger service";
const IDENTITY: &str = "Identity service";
const PAYMENTS: &str = "Payments service";
pub const MARKET: &str = "Market service";

/// Owner of this service's holds: nobody else may release or consume them.
const HOLD_OWNER: &str = "cfa";

/// What a profile says that this service needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// At least STANDARD (D08: an ordered level).
    pub is_standard: bool,
    pub bank_account: String,
    pub is_blocked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitType {
    Deposit,
    Withdrawal,
    Trading,
}

/// The operation type that a limit check names (specification 4.1: `ISSUANCE` at issue, `WITHDRAWAL` at redemption).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckedOperation {
    Issuance,
    Withdrawal,
    Transfer,
}

/// One movement of a ledger operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Posting {
    pub debit: String,
    pub credit: String,
    pub instrument_id: String,
    pub amount_minor: i64,
    pub decimals: u8,
    /// The credit waits for finality.
    pub unsettled: bool,
}

/// A ledger operation to be made; its id and its external reference are the CFA operation's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerOperation {
    pub operation_id: String,
    pub kind: LedgerKind,
    pub user_id: String,
    pub postings: Vec<Posting>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerKind {
    Of(Kind),
    Payment,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayoutState {
    Pending,
    Succeeded,
    Failed,
}

/// What trading has of a user's money.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TradingHold {
    pub hold_id: String,
    /// Free to be taken back, in the asset's smallest units.
    pub undrawn_minor: i64,
    /// Reserved by open orders.
    pub drawn_minor: i64,
}

#[derive(Clone)]
pub struct Peers {
    ledger: LedgerServiceClient<rpc::Channel>,
    payments: PaymentsServiceClient<rpc::Channel>,
    identity: IdentityServiceClient<rpc::Channel>,
    market: MarketServiceClient<rpc::Channel>,
}

fn peer_error(peer: &'static str, status: &Status) -> Error {
    match status.code() {
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Cancelled
        | Code::Unknown
        | Code::Internal
        | Code::ResourceExhausted
        | Code::Aborted => {
            tracing::warn!(peer, code = ?status.code(), message = status.message(), "peer did not answer");
            Error::Unavailable(peer)
        }
        code => Error::Peer {
            code: code as i32,
            reason: rpc::status::reason(status).unwrap_or_default(),
            message: status.message().to_owned(),
            facts: status
                .get_details_error_info()
                .map(|info| info.metadata)
                .unwrap_or_default(),
        },
    }
}

fn context(correlation_id: &str, key: &str) -> Option<common::RequestContext> {
    let mut context = rpc::Context::new("cfa");
    context.correlation_id = correlation_id.to_owned();
    context.idempotency_key = key.to_owned();
    Some(context.to_proto())
}

fn monetary(
    instrument_id: &str,
    amount_minor: i64,
    decimals: u8,
) -> Option<common::MonetaryAmount> {
    Some(convert::to_monetary_amount_minor(
        instrument_id,
        amount_minor,
        decimals,
    ))
}

fn kind_code(kind: LedgerKind) -> i32 {
    match kind {
        LedgerKind::Of(kind) => kind.code(),
        LedgerKind::Payment => common::OperationType::Payment as i32,
    }
}

fn new_operation(operation: &LedgerOperation) -> ledger::NewOperation {
    ledger::NewOperation {
        operation: Some(ledger::Operation {
            operation_id: operation.operation_id.clone(),
            r#type: kind_code(operation.kind),
            user_id: operation.user_id.clone(),
            idempotency_key: operation.operation_id.clone(),
            external_ref: Some(operation.operation_id.clone()),
            awaits_chain: true,
            ..Default::default()
        }),
        postings: operation
            .postings
            .iter()
            .map(|posting| ledger::Posting {
                debit_subaccount_id: posting.debit.clone(),
                credit_subaccount_id: posting.credit.clone(),
                amount: monetary(
                    &posting.instrument_id,
                    posting.amount_minor,
                    posting.decimals,
                ),
                unsettled: posting.unsettled,
                ..Default::default()
            })
            .collect(),
    }
}

/// Kopecks; unset is zero.
fn minor(value: Option<&common::Decimal>) -> Result<i64, Error> {
    let value = convert::optional_decimal(value)
        .map_err(|error| Error::Damaged(error.to_string()))?
        .unwrap_or_default();
    value
        .to_minor(CFA_RUB_DECIMALS)
        .map_err(|error| Error::Damaged(error.to_string()))
}

impl Peers {
    pub fn new(
        ledger: rpc::Channel,
        payments: rpc::Channel,
        identity: rpc::Channel,
        market: rpc::Channel,
    ) -> Self {
        Self {
            ledger: LedgerServiceClient::new(ledger),
            payments: PaymentsServiceClient::new(payments),
            identity: IdentityServiceClient::new(identity),
            market: MarketServiceClient::new(market),
        }
    }

    // ---- identity

    /// `None`: nobody has this id.
    pub async fn profile(
        &self,
        correlation_id: &str,
        user_id: &str,
    ) -> Result<Option<Profile>, Error> {
        let request = identity::GetUserProfileRequest {
            context: context(correlation_id, ""),
            user_id: user_id.to_owned(),
        };
        match self.identity.clone().get_user_profile(request).await {
            Ok(response) => Ok(response.into_inner().profile.map(|profile| Profile {
                is_standard: profile.kyc_status >= common::KycStatus::Standard as i32,
                is_blocked: profile.status == identity::UserStatus::Blocked as i32,
                bank_account: profile.bank_account,
            })),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(peer_error(IDENTITY, &status)),
        }
    }

    /// `None`: allowed. `Some`: refused, with the reason if there is one.
    pub async fn check_limits(
        &self,
        correlation_id: &str,
        user_id: &str,
        limit_type: LimitType,
        amount: Decimal,
        operation: CheckedOperation,
    ) -> Result<Option<Option<String>>, Error> {
        let request = identity::CheckLimitsRequest {
            context: context(correlation_id, ""),
            user_id: user_id.to_owned(),
            limit_type: match limit_type {
                LimitType::Deposit => common::LimitType::Deposit,
                LimitType::Withdrawal => common::LimitType::Withdrawal,
                LimitType::Trading => common::LimitType::Trading,
            }
            .into(),
            amount: Some(common::Money {
                currency_code: "RUB".into(),
                amount: Some(convert::to_decimal(amount)),
            }),
            operation_type: match operation {
                CheckedOperation::Issuance => common::OperationType::Issuance,
                CheckedOperation::Withdrawal => common::OperationType::Withdrawal,
                CheckedOperation::Transfer => common::OperationType::P2pTransfer,
            }
            .into(),
            notional: None,
        };
        let response = self
            .identity
            .clone()
            .check_limits(request)
            .await
            .map_err(|status| peer_error(IDENTITY, &status))?
            .into_inner();
        Ok(if response.allowed {
            None
        } else {
            Some(response.reason)
        })
    }

    /// `Some`: a hit, with its reason.
    pub async fn check_sanctions(
        &self,
        correlation_id: &str,
        user_id: &str,
        payload: &str,
    ) -> Result<Option<String>, Error> {
        let request = identity::CheckSanctionsRequest {
            context: context(correlation_id, ""),
            user_id: user_id.to_owned(),
            payload: payload.to_owned(),
        };
        let response = self
            .identity
            .clone()
            .check_sanctions(request)
            .await
            .map_err(|status| peer_error(IDENTITY, &status))?
            .into_inner();
        Ok(response.hit.then_some(if response.reason.is_empty() {
            "Sanctions hit".to_owned()
        } else {
            response.reason
        }))
    }

    // ---- ledger

    /// Holds CFA-RUB for the reserve. The id makes a repeat harmless; the key is fresh, because the
    /// ledger keeps refusals by key.
    pub async fn create_hold(
        &self,
        correlation_id: &str,
        hold_id: &str,
        user_id: &str,
        amount_minor: i64,
        reason: &str,
    ) -> Result<(), Error> {
        let request = ledger::CreateHoldRequest {
            context: context(
                correlation_id,
                &format!("{hold_id}:{}", uuid::Uuid::now_v7()),
            ),
            hold: Some(ledger::Hold {
                hold_id: hold_id.to_owned(),
                subaccount_id: format!("{user_id}:{CFA_RUB}"),
                amount: monetary(CFA_RUB, amount_minor, CFA_RUB_DECIMALS),
                reason: reason.to_owned(),
                owner: HOLD_OWNER.to_owned(),
                destination_subaccount_id: Some(format!("system:reserve:{CFA_RUB}")),
                ..Default::default()
            }),
        };
        self.ledger
            .clone()
            .create_hold(request)
            .await
            .map_err(|status| peer_error(LEDGER, &status))?;
        Ok(())
    }

    /// Consumes the whole hold; the ledger writes the REDEMPTION operation in the same transaction (T10).
    pub async fn consume_hold(
        &self,
        correlation_id: &str,
        hold_id: &str,
        operation_id: &str,
    ) -> Result<(), Error> {
        let request = ledger::ConsumeHoldRequest {
            context: context(correlation_id, &format!("{hold_id}:consume")),
            hold_id: hold_id.to_owned(),
            amount: None,
            operation_type: common::OperationType::Redemption.into(),
            external_ref: Some(operation_id.to_owned()),
        };
        self.ledger
            .clone()
            .consume_hold(request)
            .await
            .map_err(|status| peer_error(LEDGER, &status))?;
        Ok(())
    }

    /// Releases the hold; one that was released before is what was wanted.
    pub async fn release_hold(
        &self,
        correlation_id: &str,
        hold_id: &str,
        reason: &str,
    ) -> Result<(), Error> {
        let request = ledger::ReleaseHoldRequest {
            context: context(correlation_id, &format!("{hold_id}:release")),
            hold_id: hold_id.to_owned(),
            reason: reason.to_owned(),
        };
        let released = self.ledger.clone().release_hold(request).await;
        let Err(status) = released else {
            return Ok(());
        };
        let error = peer_error(LEDGER, &status);
        if matches!(&error, Error::Peer { reason, .. } if reason == "HOLD_NOT_ACTIVE" || reason == "HOLD_EXPIRED")
        {
            let request = ledger::GetHoldRequest {
                context: context(correlation_id, ""),
                hold_id: hold_id.to_owned(),
            };
            let hold = self.ledger.clone().get_hold(request).await;
            let hold = hold
                .map_err(|status| peer_error(LEDGER, &status))?
                .into_inner()
                .hold
                .unwrap_or_default();
            if matches!(
                hold.status(),
                ledger::HoldStatus::Released | ledger::HoldStatus::Expired
            ) {
                return Ok(());
            }
        }
        Err(error)
    }

    /// Posts one operation or, with several, all of them or none. `scales` teaches the ledger
    /// instruments it may not have heard of yet. Repeating is harmless: each operation has its own
    /// key, which is its id.
    pub async fn post(
        &self,
        correlation_id: &str,
        operations: &[LedgerOperation],
        scales: &[(String, u8)],
    ) -> Result<(), Error> {
        let request = ledger::CreateOperationsRequest {
            context: context(correlation_id, &uuid::Uuid::now_v7().to_string()),
            operations: operations.iter().map(new_operation).collect(),
            mode: ledger::BatchMode::AllOrNothing.into(),
            instrument_scales: scales
                .iter()
                .map(|(instrument_id, decimals)| ledger::InstrumentScale {
                    instrument_id: instrument_id.clone(),
                    decimals: u32::from(*decimals),
                })
                .collect(),
            ..Default::default()
        };
        self.ledger
            .clone()
            .create_operations(request)
            .await
            .map_err(|status| peer_error(LEDGER, &status))?;
        Ok(())
    }

    pub async fn finalize(
        &self,
        correlation_id: &str,
        operation_ids: &[String],
        tx_hash: &str,
    ) -> Result<(), Error> {
        let request = ledger::FinalizeOperationsRequest {
            context: context(
                correlation_id,
                &format!(
                    "{}:finalize",
                    operation_ids
                        .first()
                        .map(String::as_str)
                        .unwrap_or_default()
                ),
            ),
            operation_ids: operation_ids.to_vec(),
            onchain_tx_hash: tx_hash.to_owned(),
        };
        self.ledger
            .clone()
            .finalize_operations(request)
            .await
            .map_err(|status| peer_error(LEDGER, &status))?;
        Ok(())
    }

    pub async fn reverse(
        &self,
        correlation_id: &str,
        operation_id: &str,
        reason: &str,
    ) -> Result<(), Error> {
        let request = ledger::ReverseOperationRequest {
            context: context(correlation_id, &format!("{operation_id}:reverse")),
            operation_id: operation_id.to_owned(),
            reason: reason.to_owned(),
        };
        self.ledger
            .clone()
            .reverse_operation(request)
            .await
            .map_err(|status| peer_error(LEDGER, &status))?;
        Ok(())
    }

    /// Smallest units of a sub-account that active holds reserve; zero for a sub-account that does not exist.
    pub async fn held(&self, subaccount_id: &str) -> Result<Decimal, Error> {
        let request = ledger::GetBalanceRequest {
            context: context("", ""),
            subaccount_id: subaccount_id.to_owned(),
            ..Default::default()
        };
        match self.ledger.clone().get_balance(request).await {
            Ok(response) => convert::optional_decimal(response.into_inner().held.as_ref())
                .map(Option::unwrap_or_default)
                .map_err(|error| Error::Damaged(error.to_string())),
            Err(status) if status.code() == Code::NotFound => Ok(Decimal::ZERO),
            Err(status) => Err(peer_error(LEDGER, &status)),
        }
    }

    /// Kopecks of a user's CFA-RUB that nothing reserves.
    pub async fn available(&self, correlation_id: &str, user_id: &str) -> Result<i64, Error> {
        let request = ledger::GetBalanceRequest {
            context: context(correlation_id, ""),
            subaccount_id: format!("{user_id}:{CFA_RUB}"),
            ..Default::default()
        };
        let answer = self.ledger.clone().get_balance(request).await;
        let answer = answer
            .map_err(|status| peer_error(LEDGER, &status))?
            .into_inner();
        minor(answer.available.as_ref())
    }

    /// Has settlement posted this trade? Its buyer's operation has the trade's id as its key.
    pub async fn has_trade(
        &self,
        correlation_id: &str,
        buyer_id: &str,
        trade_id: &str,
    ) -> Result<bool, Error> {
        let request = ledger::ListOperationsRequest {
            context: context(correlation_id, ""),
            user_id: buyer_id.to_owned(),
            r#type: common::OperationType::TradeBuy.into(),
            idempotency_key: trade_id.to_owned(),
            ..Default::default()
        };
        let found = self.ledger.clone().list_operations(request).await;
        let found = found
            .map_err(|status| peer_error(LEDGER, &status))?
            .into_inner()
            .operations;
        Ok(found
            .iter()
            .any(|operation| operation.external_ref.as_deref() == Some(trade_id)))
    }

    // ---- market

    /// The user's open trading hold of CFA-RUB.
    pub async fn trading_hold(
        &self,
        correlation_id: &str,
        user_id: &str,
    ) -> Result<Option<TradingHold>, Error> {
        let request = market::ListTradingHoldsRequest {
            context: context(correlation_id, ""),
            user_id: user_id.to_owned(),
            instrument_id: CFA_RUB.to_owned(),
            pagination: None,
        };
        let listed = self.market.clone().list_trading_holds(request).await;
        let listed = listed
            .map_err(|status| peer_error(MARKET, &status))?
            .into_inner()
            .trading_holds;
        // newest first; there is one open at a time
        let open = listed
            .into_iter()
            .find(|hold| hold.status() == market::TradingHoldStatus::Open);
        open.map(|hold| {
            Ok(TradingHold {
                undrawn_minor: minor(hold.undrawn.as_ref())?,
                drawn_minor: minor(hold.drawn.as_ref())?,
                hold_id: hold.hold_id,
            })
        })
        .transpose()
    }

    /// Sets what no order has drawn, in kopecks. The ledger may give the money back a moment later.
    pub async fn set_undrawn(
        &self,
        correlation_id: &str,
        key: &str,
        hold_id: &str,
        undrawn_minor: i64,
    ) -> Result<(), Error> {
        let undrawn = Decimal::from_minor(undrawn_minor, CFA_RUB_DECIMALS);
        let request = market::AdjustTradingHoldRequest {
            context: context(correlation_id, key),
            hold_id: hold_id.to_owned(),
            undrawn: Some(convert::to_decimal(undrawn)),
        };
        self.market
            .clone()
            .adjust_trading_hold(request)
            .await
            .map_err(|status| peer_error(MARKET, &status))?;
        Ok(())
    }

    // ---- payments

    /// True when payments holds the deposit of this user in this amount with this status: SUCCESS
    /// while its money is here, REFUNDED once it was paid back.
    pub async fn is_deposit(
        &self,
        status: common::PaymentStatus,
        correlation_id: &str,
        payment_id: &str,
        user_id: &str,
        amount_minor: i64,
    ) -> Result<bool, Error> {
        let request = payments::GetPaymentIntentRequest {
            context: context(correlation_id, ""),
            payment_id: payment_id.to_owned(),
        };
        let intent = match self.payments.clone().get_payment_intent(request).await {
            Ok(response) => response.into_inner().intent,
            Err(status) if status.code() == Code::NotFound => None,
            Err(status) => return Err(peer_error(PAYMENTS, &status)),
        };
        Ok(intent.is_some_and(|intent| {
            intent.status() == status
                && intent.payment_id == payment_id
                && intent.user_id == user_id
                && convert::money_minor(intent.amount.as_ref()) == Ok(amount_minor)
        }))
    }

    /// Records a payout. The gateway answers with what it stored under the id before, if anything.
    ///
    /// # Errors
    /// `PayoutIdTaken`: that is another user's or of another amount. It must not be released for this one.
    pub async fn initiate_payout(
        &self,
        correlation_id: &str,
        payout_id: &str,
        user_id: &str,
        amount_minor: i64,
        bank_account: &str,
    ) -> Result<(), Error> {
        let request = payments::InitiatePayoutRequest {
            context: context(correlation_id, &format!("{payout_id}:initiate")),
            payout: Some(payments::PayoutRequest {
                payout_id: payout_id.to_owned(),
                user_id: user_id.to_owned(),
                amount: Some(convert::to_money(amount_minor)),
                bank_account: bank_account.to_owned(),
            }),
        };
        let stored = self
            .payments
            .clone()
            .initiate_payout(request)
            .await
            .map_err(|status| peer_error(PAYMENTS, &status))?
            .into_inner()
            .payout;
        // the account may have changed since the payout was recorded
        let same = stored.is_some_and(|stored| {
            stored.user_id == user_id
                && convert::money_minor(stored.amount.as_ref()) == Ok(amount_minor)
        });
        if !same {
            return Err(Refusal::PayoutIdTaken.into());
        }
        Ok(())
    }

    pub async fn release_payout(&self, correlation_id: &str, payout_id: &str) -> Result<(), Error> {
        let request = payments::ReleasePayoutRequest {
            context: context(correlation_id, &format!("{payout_id}:release")),
            payout_id: payout_id.to_owned(),
        };
        self.payments
            .clone()
            .release_payout(request)
            .await
            .map_err(|status| peer_error(PAYMENTS, &status))?;
        Ok(())
    }

    pub async fn cancel_payout(
        &self,
        correlation_id: &str,
        payout_id: &str,
        failure_code: &str,
    ) -> Result<(), Error> {
        let request = payments::CancelPayoutRequest {
            context: context(correlation_id, &format!("{payout_id}:cancel")),
            payout_id: payout_id.to_owned(),
            failure_code: failure_code.to_owned(),
        };
        self.payments
            .clone()
            .cancel_payout(request)
            .await
            .map_err(|status| peer_error(PAYMENTS, &status))?;
        Ok(())
    }

    /// `None`: the gateway does not know the payout.
    pub async fn payout(
        &self,
        correlation_id: &str,
        payout_id: &str,
    ) -> Result<Option<PayoutState>, Error> {
        let request = payments::GetPayoutRequest {
            context: context(correlation_id, ""),
            payout_id: payout_id.to_owned(),
        };
        let payout = match self.payments.clone().get_payout(request).await {
            Ok(response) => response.into_inner().payout,
            Err(status) if status.code() == Code::NotFound => None,
            Err(status) => return Err(peer_error(PAYMENTS, &status)),
        };
        Ok(payout.map(|payout| match payout.status() {
            common::PaymentStatus::Success => PayoutState::Succeeded,
            common::PaymentStatus::Failed | common::PaymentStatus::Expired => PayoutState::Failed,
            _ => PayoutState::Pending,
        }))
    }
}
