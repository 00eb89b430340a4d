//! Clients of the called services: identity, ledger, payments, market.
//!
//! An unavailable service is `Error::Unavailable`: the step is retried later with the same
//! idempotency key. A refusal is `Error::Peer` with its reason and exact text.

use service_clients::identity::Profile;
use service_clients::ledger::{Batch, HoldStep, Operation, Posting};
use service_clients::{
    AuditClient, AuditedService, CallError, IdentityClient, LedgerClient, LimitType, MarketClient,
    OperationType, PaymentsClient, caused_by,
};
use types::{Amount, Id128, InstrumentId, Minor, subaccount};

use crate::error::{Error, Refusal};
use crate::model::{
    self, CFA_RUB, CFA_RUB_DECIMALS, Instrument, Rejection, Status, limit_rejection,
};

/// Source name in outgoing calls, and owner of this service's holds. No other service may release
/// or consume these holds.
pub const SOURCE: &str = "cfa";
pub const MARKET: &str = MarketClient::SERVICE;
/// Owner of the market's holds.
pub const MARKET_OWNER: &str = "market";

pub struct Peers {
    pub ledger: LedgerClient,
    pub payments: PaymentsClient,
    pub identity: IdentityClient,
    pub market: MarketClient,
    /// The services whose audit records are anchored.
    pub audited: Vec<AuditClient>,
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Unavailable { service, .. } => Self::Unavailable(service),
            CallError::Refused(_) => Self::Peer(error.into()),
            CallError::Unreadable { .. } => Self::Damaged(error.to_string()),
        }
    }
}

/// Parses a stored hold id.
pub fn hold_id(text: Option<&str>) -> Result<Id128, Error> {
    text.and_then(Id128::parse)
        .ok_or_else(|| Error::Damaged("hold id".to_owned()))
}

/// Builds a ledger operation whose id is also its key and external reference.
pub fn operation(
    operation_id: &str,
    operation_type: OperationType,
    user_id: &str,
    postings: Vec<Posting>,
) -> Operation {
    Operation {
        operation_id: operation_id.to_owned(),
        operation_type,
        user_id: user_id.to_owned(),
        idempotency_key: operation_id.to_owned(),
        external_ref: operation_id.to_owned(),
        postings,
    }
}

/// An amount of an instrument, from its smallest units.
pub fn units(instrument: &Instrument, units_minor: i64) -> Result<Amount, Error> {
    let id = InstrumentId::new(&instrument.instrument_id);
    Ok(Amount {
        instrument: id.map_err(|error| Error::Damaged(format!("instrument id {error}")))?,
        decimals: instrument.decimals,
        minor: Minor(units_minor),
    })
}

impl Peers {
    pub fn new(
        ledger: rpc::Channel,
        payments: rpc::Channel,
        identity: rpc::Channel,
        market: rpc::Channel,
        audited: Vec<(AuditedService, rpc::Channel)>,
    ) -> Self {
        let audited = audited.into_iter();
        let audited = audited.map(|(service, channel)| AuditClient::new(service, channel, SOURCE));
        Self {
            ledger: LedgerClient::new(ledger, SOURCE),
            payments: PaymentsClient::new(payments, SOURCE),
            identity: IdentityClient::new(identity, SOURCE),
            market: MarketClient::new(market, SOURCE),
            audited: audited.collect(),
        }
    }

    // ---- identity

    /// # Errors
    /// `UserNotFound` for an unknown id.
    pub async fn profile(&self, correlation_id: &str, user_id: &str) -> Result<Profile, Error> {
        let context = caused_by(correlation_id);
        match self.identity.profile(&context, user_id).await {
            Err(error) if error.is_not_found() => Err(Refusal::UserNotFound.into()),
            profile => Ok(profile?),
        }
    }

    /// Why a user may neither send nor receive units (R304, D47). `None`: the user may.
    pub async fn user_refusal(
        &self,
        correlation_id: &str,
        user_id: &str,
    ) -> Result<Option<Refusal>, Error> {
        let profile = self.profile(correlation_id, user_id).await?;
        let refusal = if profile.is_blocked {
            Some(Refusal::UserBlocked)
        } else if !profile.is_standard {
            Some(Refusal::KycTooLow)
        } else {
            None
        };
        Ok(refusal)
    }

    /// Asks whether the user's day limit allows the operation. `Some`: refused.
    pub async fn check_limits(
        &self,
        operation: &model::Operation,
    ) -> Result<Option<(Rejection, String)>, Error> {
        let Some((limit, kind, amount)) = operation.limit_use() else {
            return Ok(None);
        };
        let context = caused_by(&operation.correlation_id);
        let (identity, user_id) = (&self.identity, &operation.user_id);
        let checked = identity.check_limits(&context, user_id, limit, kind, amount, None);
        Ok(checked.await?.map(limit_rejection))
    }

    /// Reserves the operation's amount in the user's day limit, once. `Some`: the limit is refused.
    ///
    /// # Errors
    /// `Unavailable` while identity does not answer, or refuses the call itself.
    pub async fn reserve_limit(
        &self,
        operation: &model::Operation,
    ) -> Result<Option<(Rejection, String)>, Error> {
        let Some((limit, kind, amount)) = operation.limit_use() else {
            return Ok(None);
        };
        let context = caused_by(&operation.correlation_id);
        let (identity, user_id) = (&self.identity, &operation.user_id);
        let id = &operation.operation_id;
        let reserved = identity.reserve_limit(&context, id, user_id, limit, kind, amount);
        match reserved.await {
            // CheckLimits accepted the operation, so a refused call is a fault of the installation.
            // The sweep retries the reservation.
            Err(error @ CallError::Refused(_)) => {
                tracing::error!(
                    operation_id = id,
                    error = error.describe(),
                    "identity refuses to reserve a limit, retrying"
                );
                Err(Error::Unavailable(IdentityClient::SERVICE))
            }
            reserved => Ok(reserved?.map(limit_rejection)),
        }
    }

    /// Confirms the limit reservation of a finalized operation. Cancels that of any other.
    pub async fn end_limit(&self, operation: &model::Operation) -> Result<(), CallError> {
        let context = caused_by(&operation.correlation_id);
        let id = &operation.operation_id;
        match operation.status {
            Status::Finalized => self.identity.confirm_limit(&context, id, None).await,
            _ => self.identity.cancel_limit(&context, id).await,
        }
    }

    /// Reserves the payment of a subscription in a limit, once per reservation. Returns the reason
    /// of a refusal.
    ///
    /// # Errors
    /// `Unavailable` while identity does not answer, or refuses the call itself.
    pub async fn reserve_payment(
        &self,
        offer: &model::Offer,
        reservation_id: &str,
        limit: LimitType,
    ) -> Result<Option<String>, Error> {
        let context = caused_by(&offer.correlation_id);
        let amount = Amount::rubles(Minor(offer.payment_minor)).decimal();
        let (identity, user_id) = (&self.identity, &offer.user_id);
        let kind = OperationType::Issuance;
        let reserved =
            identity.reserve_limit(&context, reservation_id, user_id, limit, kind, amount);
        match reserved.await {
            // The caller has read the profile, so a refused call is a fault of the installation.
            Err(error @ CallError::Refused(_)) => {
                tracing::error!(
                    reservation_id,
                    error = error.describe(),
                    "identity refuses to reserve a limit, retrying"
                );
                Err(Error::Unavailable(IdentityClient::SERVICE))
            }
            reserved => Ok(reserved?),
        }
    }

    // ---- ledger

    /// The user's available CFA-RUB, in kopecks.
    pub async fn available_money(&self, correlation_id: &str, user_id: &str) -> Result<i64, Error> {
        let context = caused_by(correlation_id);
        let account = subaccount::of_user(user_id, CFA_RUB);
        let balance = self.ledger.balance(&context, &account).await?;
        let available = balance.available.to_minor(CFA_RUB_DECIMALS);
        available.map_err(|error| Error::Damaged(error.to_string()))
    }

    /// Posts the operations, all or none. `scales` are the decimals of instruments that the ledger
    /// may not know yet. A repeat is safe although the call's key is new: the key of each operation
    /// is its id.
    pub async fn post(
        &self,
        correlation_id: &str,
        operations: &[Operation],
        scales: &[(String, u8)],
    ) -> Result<(), Error> {
        self.post_with_steps(correlation_id, operations, Vec::new(), scales)
            .await
    }

    /// Like `post`, with changes of holds in the same ledger transaction. Each change must do
    /// nothing when it is repeated.
    pub async fn post_with_steps(
        &self,
        correlation_id: &str,
        operations: &[Operation],
        hold_steps: Vec<HoldStep>,
        scales: &[(String, u8)],
    ) -> Result<(), Error> {
        let batch = Batch {
            operations: operations.to_vec(),
            hold_steps,
            scales: scales.to_vec(),
            ..Batch::default()
        };
        let key = uuid::Uuid::now_v7().to_string();
        let context = caused_by(correlation_id);
        let posted = self.ledger.create_operations(&context, &key, batch);
        Ok(posted.await?)
    }

    /// Finalizes operations. The id of the first determines the call's key.
    pub async fn finalize(
        &self,
        correlation_id: &str,
        operation_ids: &[String],
        tx_hash: &str,
    ) -> Result<(), Error> {
        let first = operation_ids.first().map_or("", String::as_str);
        let key = format!("{first}:finalize");
        let context = caused_by(correlation_id);
        let finalized = self.ledger.finalize(&context, &key, operation_ids, tx_hash);
        Ok(finalized.await?)
    }

    pub async fn reverse(
        &self,
        correlation_id: &str,
        operation_id: &str,
        reason: &str,
    ) -> Result<(), Error> {
        let key = format!("{operation_id}:reverse");
        let context = caused_by(correlation_id);
        let reversed = self.ledger.reverse(&context, &key, operation_id, reason);
        Ok(reversed.await?)
    }

    // ---- payments

    /// Records a payout at payments.
    ///
    /// # Errors
    /// `PayoutIdTaken`: the id belongs to a payout of another user or amount. The caller must not
    /// release that payout.
    pub async fn initiate_payout(
        &self,
        correlation_id: &str,
        payout_id: &str,
        user_id: &str,
        amount: Minor,
        bank_account: &str,
    ) -> Result<(), Error> {
        let context = caused_by(correlation_id);
        let recorded =
            self.payments
                .initiate_payout(&context, payout_id, user_id, amount, bank_account);
        match recorded.await? {
            true => Ok(()),
            false => Err(Refusal::PayoutIdTaken.into()),
        }
    }
}
