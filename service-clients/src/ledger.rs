//! Client of the ledger: balances, holds, operations.

use async_recursion::async_recursion as boxed;
use prost::Message;
use proto::common::v1 as common;
use proto::convert::{timestamp_us, to_timestamp_us};
use proto::ledger::v1 as pb;
use proto::ledger::v1::hold_step::Step;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use rpc::Context;
use types::{Amount, Decimal, HoldStatus, Id128};
use uuid::Uuid;

use crate::convert::{number, number_or_zero, to_amount};
use crate::policy::{all_pages, call, client, not_found_as_none};
use crate::{Answer, CallError, OperationStatus, OperationType};

/// Sub-accounts per request and page: the ledger's limit.
const SUBACCOUNT_IDS_MAX: usize = 1_000;

/// Amounts of a sub-account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    pub balance: Decimal,
    pub held: Decimal,
    pub unsettled: Decimal,
    pub available: Decimal,
}

/// A ledger hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    pub hold_id: Id128,
    pub parent: Option<Id128>,
    pub subaccount_id: String,
    pub instrument_id: String,
    /// Original amount plus all additions.
    pub amount: Decimal,
    /// Released amount, which is available again.
    pub released: Decimal,
    pub remaining: Decimal,
    pub status: HoldStatus,
    pub reason: String,
    pub created_at_us: i64,
}

impl Hold {
    pub fn is_active(&self) -> bool {
        self.status == HoldStatus::Active
    }

    /// True if the hold is released or expired.
    pub fn is_money_available(&self) -> bool {
        matches!(self.status, HoldStatus::Released | HoldStatus::Expired)
    }
}

/// A ledger sub-account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubAccount {
    pub subaccount_id: String,
    pub instrument_id: String,
    pub balance: Decimal,
    pub held: Decimal,
    /// Credited by operations that are not final.
    pub unsettled: Decimal,
}

/// The last block of the audit chain and the last audit record. Hashes in hex.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainHead {
    pub block: u64,
    pub hash: String,
    pub record: u64,
    pub record_hash: String,
}

/// Remaining amount and destination of an active hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveHold {
    pub subaccount_id: String,
    pub instrument_id: String,
    pub remaining: Decimal,
    /// Sub-account that receives the money; empty if not fixed.
    pub destination: String,
}

/// Totals of an instrument over all sub-accounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrialBalance {
    pub instrument_id: String,
    /// Sum of all balances: zero.
    pub total: Decimal,
    /// Negated balance of the reserve account `system:reserve:<instrument>`.
    pub circulating: Decimal,
    pub active_holds: Decimal,
    pub unsettled: Decimal,
}

/// A hold to create.
#[derive(Clone, Copy, Debug)]
pub struct NewHold<'a> {
    pub hold_id: Id128,
    pub subaccount_id: &'a str,
    pub amount: Amount,
    pub reason: &'a str,
    /// The only service that may release or consume the hold.
    pub owner: &'a str,
    /// Destination of the money when the hold is consumed.
    pub destination: Option<&'a str>,
    /// Time at which the ledger releases the hold; `None` = never.
    pub expires_at_us: Option<i64>,
}

/// One posting of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Posting {
    pub debit: String,
    pub credit: String,
    pub amount: Amount,
    /// The hold that the debit is paid from.
    pub hold: Option<Id128>,
    /// The credit is unsettled until finality.
    pub unsettled: bool,
}

/// An operation to create. It becomes final once the chain has confirmed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    pub operation_id: String,
    pub operation_type: OperationType,
    pub user_id: String,
    pub idempotency_key: String,
    pub external_ref: String,
    pub postings: Vec<Posting>,
}

/// Kind of a hold change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldChange {
    /// Creates the hold from its parent's money.
    SplitFrom { parent: Id128 },
    /// Increases the hold, from its parent or, without a parent, from the available balance.
    Grow,
    /// Returns money of the hold to its parent.
    ReturnToParent,
    /// Makes money of the hold available again.
    Shrink,
}

/// A hold change and its position among the operations of its batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldStep {
    /// Index of the operation before which the change is executed.
    pub before_operation: u32,
    pub hold: Id128,
    pub change: HoldChange,
    /// `None` = the whole remaining amount.
    pub amount: Option<Amount>,
    /// Empty for [`HoldChange::Grow`].
    pub reason: String,
}

/// One ledger transaction: all or nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub operations: Vec<Operation>,
    pub hold_steps: Vec<HoldStep>,
    /// Instruments that may be new to the ledger, with their decimals.
    pub scales: Vec<(String, u8)>,
    /// Name of the record stream; empty if the batch has none. The ledger stores `through_sequence`
    /// as its position in the stream.
    pub source: String,
    pub first_sequence: u64,
    pub through_sequence: u64,
}

/// A batch request with its idempotency key. Callers store it before the first attempt and send it
/// unchanged in every attempt, unless the ledger refuses it and operations are withdrawn.
#[derive(Clone, Debug, PartialEq)]
pub struct SealedBatch(pub(crate) pb::CreateOperationsRequest);

impl SealedBatch {
    /// Seals a batch. The request id is the key, so equal batches encode to equal bytes.
    pub fn new(batch: Batch, source: &str, key: &str) -> Self {
        let context = common::RequestContext {
            request_id: key.to_owned(),
            correlation_id: key.to_owned(),
            idempotency_key: key.to_owned(),
            source: source.to_owned(),
            ..Default::default()
        };
        Self(batch.into_request(Some(context)))
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.encode_to_vec()
    }

    /// Decodes a stored batch. `None` if the bytes are not a sealed batch.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        pb::CreateOperationsRequest::decode(bytes).ok().map(Self)
    }
}

client! {
    /// Client of the ledger.
    LedgerClient, LedgerServiceClient, "Ledger service"
}

impl LedgerClient {
    /// Amounts of a sub-account; zeros if it does not exist.
    #[boxed]
    pub async fn balance(&self, context: &Context, subaccount_id: &str) -> Answer<Balance> {
        let request = pb::GetBalanceRequest {
            context: self.peer.context(context),
            subaccount_id: subaccount_id.to_owned(),
            ..Default::default()
        };
        let Some(answer) = not_found_as_none(self.peer.call(request, call!(get_balance)).await)?
        else {
            return Ok(Balance::default());
        };
        let read = |value| number(value).map_err(|what| self.peer.malformed_response(what));
        Ok(Balance {
            balance: read(answer.balance.as_ref())?,
            held: read(answer.held.as_ref())?,
            unsettled: read(answer.unsettled.as_ref())?,
            available: read(answer.available.as_ref())?,
        })
    }

    /// Creates the hold, or returns the existing hold with this id.
    #[boxed]
    pub async fn create_hold<'a: 'async_recursion>(
        &self,
        context: &Context,
        new: NewHold<'a>,
    ) -> Answer<Hold> {
        // Each call uses a new idempotency key, because under an old one the ledger repeats a
        // stored refusal. The hold id makes the call idempotent.
        let key = format!("{}:{}", new.hold_id, Uuid::now_v7());
        let hold = pb::Hold {
            hold_id: new.hold_id.to_string(),
            subaccount_id: new.subaccount_id.to_owned(),
            amount: to_amount(&new.amount),
            reason: new.reason.to_owned(),
            owner: new.owner.to_owned(),
            destination_subaccount_id: new.destination.map(str::to_owned),
            expires_at: new.expires_at_us.map(to_timestamp_us),
            ..pb::Hold::default()
        };
        let request = pb::CreateHoldRequest {
            context: self.peer.keyed(context, &key),
            hold: Some(hold),
        };
        let answer = self.peer.call(request, call!(create_hold)).await?;
        self.read_hold(answer.hold)
    }

    /// Consumes the whole hold and posts its operation, in one ledger transaction (T10).
    #[boxed]
    pub async fn consume_hold(
        &self,
        context: &Context,
        hold_id: Id128,
        operation_type: OperationType,
        external_ref: &str,
    ) -> Answer<()> {
        let request = pb::ConsumeHoldRequest {
            context: self.peer.keyed(context, &format!("{hold_id}:consume")),
            hold_id: hold_id.to_string(),
            amount: None,
            operation_type: operation_type.code(),
            external_ref: Some(external_ref.to_owned()),
        };
        self.peer.send(request, call!(consume_hold)).await
    }

    /// Releases the rest of a hold. Also succeeds if the hold is already released or expired.
    #[boxed]
    pub async fn release_hold(
        &self,
        context: &Context,
        hold_id: Id128,
        reason: &str,
    ) -> Answer<()> {
        let request = pb::ReleaseHoldRequest {
            context: self.peer.keyed(context, &format!("{hold_id}:release")),
            hold_id: hold_id.to_string(),
            reason: reason.to_owned(),
        };
        let Err(error) = self.peer.call(request, call!(release_hold)).await else {
            return Ok(());
        };
        let has_ended = matches!(
            error.reason().as_deref(),
            Some("HOLD_NOT_ACTIVE" | "HOLD_EXPIRED")
        );
        if has_ended {
            let hold = self.hold(context, hold_id).await?;
            if hold.is_some_and(|hold| hold.is_money_available()) {
                return Ok(());
            }
        }
        Err(error)
    }

    /// Freezes a sub-account, or makes it active again, once per key.
    #[boxed]
    pub async fn set_frozen(
        &self,
        context: &Context,
        key: &str,
        subaccount_id: &str,
        is_frozen: bool,
        reason: &str,
    ) -> Answer<()> {
        let status = match is_frozen {
            true => pb::SubAccountStatus::Frozen,
            false => pb::SubAccountStatus::Active,
        };
        let request = pb::SetSubAccountStatusRequest {
            context: self.peer.keyed(context, key),
            subaccount_id: subaccount_id.to_owned(),
            status: status.into(),
            reason: reason.to_owned(),
        };
        self.peer.send(request, call!(set_sub_account_status)).await
    }

    /// A hold; `None` for an unknown id.
    #[boxed]
    pub async fn hold(&self, context: &Context, hold_id: Id128) -> Answer<Option<Hold>> {
        let request = pb::GetHoldRequest {
            context: self.peer.context(context),
            hold_id: hold_id.to_string(),
        };
        match not_found_as_none(self.peer.call(request, call!(get_hold)).await)? {
            Some(answer) => self.read_hold(answer.hold).map(Some),
            None => Ok(None),
        }
    }

    /// Active holds of an owner, or of all owners if `owner` is empty. With `parent`, only its
    /// children. Skips holds whose id is not a UUID: no service of the platform created them.
    #[boxed]
    pub async fn active_holds(
        &self,
        context: &Context,
        owner: &str,
        parent: Option<Id128>,
    ) -> Answer<Vec<Hold>> {
        all_pages(|pagination| {
            let request = pb::ListHoldsRequest {
                context: self.peer.context(context),
                status: pb::HoldStatus::Active.into(),
                owner: owner.to_owned(),
                parent_hold_id: parent.map(|id| id.to_string()).unwrap_or_default(),
                pagination,
                ..Default::default()
            };
            async move {
                let page = self.peer.call(request, call!(list_holds)).await?;
                let holds = page.holds.into_iter();
                let holds = holds
                    .filter(|hold| Id128::parse(&hold.hold_id).is_some())
                    .map(|hold| self.read_hold(Some(hold)));
                Ok((holds.collect::<Result<_, _>>()?, page.pagination))
            }
        })
        .await
    }

    /// The owner's active holds on a sub-account. Skips holds whose id is not a UUID.
    #[boxed]
    pub async fn active_holds_of(
        &self,
        context: &Context,
        subaccount_id: &str,
        owner: &str,
    ) -> Answer<Vec<Hold>> {
        all_pages(|pagination| {
            let request = pb::ListHoldsRequest {
                context: self.peer.context(context),
                subaccount_id: subaccount_id.to_owned(),
                status: pb::HoldStatus::Active.into(),
                owner: owner.to_owned(),
                pagination,
                ..Default::default()
            };
            async move {
                let page = self.peer.call(request, call!(list_holds)).await?;
                let holds = page.holds.into_iter();
                let holds = holds
                    .filter(|hold| Id128::parse(&hold.hold_id).is_some())
                    .map(|hold| self.read_hold(Some(hold)));
                Ok((holds.collect::<Result<_, _>>()?, page.pagination))
            }
        })
        .await
    }

    /// All sub-accounts of an instrument, or of all instruments if `instrument_id` is empty.
    /// `on_page` receives the number of rows of each page.
    #[boxed]
    pub async fn sub_accounts(
        &self,
        context: &Context,
        instrument_id: &str,
        on_page: &(dyn Fn(usize) + Sync),
    ) -> Answer<Vec<SubAccount>> {
        all_pages(|pagination| {
            let request = pb::ListSubAccountsRequest {
                context: self.peer.context(context),
                instrument_id: instrument_id.to_owned(),
                pagination,
                ..Default::default()
            };
            async move {
                let page = self.peer.call(request, call!(list_sub_accounts)).await?;
                on_page(page.subaccounts.len());
                Ok((self.read_sub_accounts(page.subaccounts)?, page.pagination))
            }
        })
        .await
    }

    /// The ends of the audit chains.
    #[boxed]
    pub async fn chain_head(&self, context: &Context) -> Answer<ChainHead> {
        let request = pb::GetChainHeadRequest {
            context: self.peer.context(context),
        };
        let head = self.peer.call(request, call!(get_chain_head)).await?;
        Ok(ChainHead {
            block: head.block,
            hash: head.hash,
            record: head.record,
            record_hash: head.record_hash,
        })
    }

    /// All sub-accounts of a user.
    #[boxed]
    pub async fn sub_accounts_of_user(
        &self,
        context: &Context,
        user_id: &str,
    ) -> Answer<Vec<SubAccount>> {
        all_pages(|pagination| {
            let request = pb::ListSubAccountsRequest {
                context: self.peer.context(context),
                user_id: user_id.to_owned(),
                pagination,
                ..Default::default()
            };
            async move {
                let page = self.peer.call(request, call!(list_sub_accounts)).await?;
                Ok((self.read_sub_accounts(page.subaccounts)?, page.pagination))
            }
        })
        .await
    }

    /// The existing sub-accounts with these ids, in any order. Makes one call per 1000 ids.
    #[boxed]
    pub async fn sub_accounts_by_id(
        &self,
        context: &Context,
        subaccount_ids: &[String],
    ) -> Answer<Vec<SubAccount>> {
        let mut found = Vec::with_capacity(subaccount_ids.len());
        for ids in subaccount_ids.chunks(SUBACCOUNT_IDS_MAX) {
            let request = pb::ListSubAccountsRequest {
                context: self.peer.context(context),
                subaccount_ids: ids.to_vec(),
                pagination: Some(common::PaginationRequest {
                    page_size: SUBACCOUNT_IDS_MAX as i32,
                    ..Default::default()
                }),
                ..Default::default()
            };
            let page = self.peer.call(request, call!(list_sub_accounts)).await?;
            found.extend(self.read_sub_accounts(page.subaccounts)?);
        }
        Ok(found)
    }

    fn read_sub_accounts(&self, rows: Vec<pb::SubAccount>) -> Answer<Vec<SubAccount>> {
        let rows = rows.into_iter().map(|row| {
            Ok(SubAccount {
                balance: self.read_or_zero(row.balance.as_ref())?,
                held: self.read_or_zero(row.held.as_ref())?,
                unsettled: self.read_or_zero(row.unsettled.as_ref())?,
                subaccount_id: row.subaccount_id,
                instrument_id: row.instrument_id,
            })
        });
        rows.collect()
    }

    /// The remaining amounts of all active holds of all owners.
    #[boxed]
    pub async fn active_hold_amounts(&self, context: &Context) -> Answer<Vec<ActiveHold>> {
        all_pages(|pagination| {
            let request = pb::ListHoldsRequest {
                context: self.peer.context(context),
                status: HoldStatus::Active.code(),
                pagination,
                ..Default::default()
            };
            async move {
                let page = self.peer.call(request, call!(list_holds)).await?;
                let rows = page.holds.into_iter().map(|hold| {
                    let left = hold.remaining_amount.unwrap_or_default();
                    Ok(ActiveHold {
                        remaining: self.read_or_zero(left.amount.as_ref())?,
                        subaccount_id: hold.subaccount_id,
                        instrument_id: left.currency_code,
                        destination: hold.destination_subaccount_id.unwrap_or_default(),
                    })
                });
                Ok((rows.collect::<Result<_, _>>()?, page.pagination))
            }
        })
        .await
    }

    /// Totals per instrument.
    #[boxed]
    pub async fn trial_balance(&self, context: &Context) -> Answer<Vec<TrialBalance>> {
        let request = pb::GetTrialBalanceRequest {
            context: self.peer.context(context),
            ..Default::default()
        };
        let answer = self.peer.call(request, call!(get_trial_balance)).await?;
        let lines = answer.lines.into_iter().map(|line| {
            Ok(TrialBalance {
                total: self.read_or_zero(line.total.as_ref())?,
                circulating: self.read_or_zero(line.circulating.as_ref())?,
                active_holds: self.read_or_zero(line.active_holds.as_ref())?,
                unsettled: self.read_or_zero(line.unsettled.as_ref())?,
                instrument_id: line.instrument_id,
            })
        });
        lines.collect()
    }

    /// Posts the operations and hold changes of a batch, once per key.
    #[boxed]
    pub async fn create_operations(
        &self,
        context: &Context,
        key: &str,
        batch: Batch,
    ) -> Answer<()> {
        let request = batch.into_request(self.peer.keyed(context, key));
        self.peer.send(request, call!(create_operations)).await
    }

    /// Posts a sealed batch. Returns true if the ledger had already posted it. The text of a
    /// refusal names the refused trade or hold.
    #[boxed]
    pub async fn create_sealed_operations(&self, sealed: &SealedBatch) -> Answer<bool> {
        let answer = self.peer.call(sealed.0.clone(), call!(create_operations));
        let answer = answer.await.map_err(|error| sealed.locate(error))?;
        Ok(answer.replayed)
    }

    /// Changes one hold, once per key.
    #[boxed]
    pub async fn change_hold(
        &self,
        context: &Context,
        key: &str,
        hold: Id128,
        change: HoldChange,
        amount: Amount,
        reason: &str,
    ) -> Answer<()> {
        let step = HoldStep {
            before_operation: 0,
            hold,
            change,
            amount: Some(amount),
            reason: reason.to_owned(),
        };
        let batch = Batch {
            hold_steps: vec![step],
            ..Batch::default()
        };
        self.create_operations(context, key, batch).await
    }

    /// Makes operations final, once per key.
    #[boxed]
    pub async fn finalize(
        &self,
        context: &Context,
        key: &str,
        operation_ids: &[String],
        tx_hash: &str,
    ) -> Answer<()> {
        let request = pb::FinalizeOperationsRequest {
            context: self.peer.keyed(context, key),
            operation_ids: operation_ids.to_vec(),
            onchain_tx_hash: tx_hash.to_owned(),
        };
        self.peer.send(request, call!(finalize_operations)).await
    }

    /// Reverses an operation, once per key.
    #[boxed]
    pub async fn reverse(
        &self,
        context: &Context,
        key: &str,
        operation_id: &str,
        reason: &str,
    ) -> Answer<()> {
        let request = pb::ReverseOperationRequest {
            context: self.peer.keyed(context, key),
            operation_id: operation_id.to_owned(),
            reason: reason.to_owned(),
        };
        self.peer.send(request, call!(reverse_operation)).await
    }

    /// Status of an operation. An unknown id is refused (`NOT_FOUND`).
    #[boxed]
    pub async fn operation_status(
        &self,
        context: &Context,
        operation_id: &str,
    ) -> Answer<OperationStatus> {
        let request = pb::GetOperationRequest {
            context: self.peer.context(context),
            operation_id: operation_id.to_owned(),
        };
        let answer = self.peer.call(request, call!(get_operation)).await?;
        let status = answer.operation.map_or(0, |operation| operation.status);
        OperationStatus::from_code(status)
            .ok_or_else(|| self.peer.malformed_response("operation has no status"))
    }

    /// Whether the user has an operation with this type, key and external reference.
    #[boxed]
    pub async fn has_operation(
        &self,
        context: &Context,
        user_id: &str,
        operation_type: OperationType,
        key: &str,
        external_ref: &str,
    ) -> Answer<bool> {
        let request = pb::ListOperationsRequest {
            context: self.peer.context(context),
            user_id: user_id.to_owned(),
            r#type: operation_type.code(),
            idempotency_key: key.to_owned(),
            ..Default::default()
        };
        let answer = self.peer.call(request, call!(list_operations)).await?;
        Ok(answer
            .operations
            .iter()
            .any(|operation| operation.external_ref.as_deref() == Some(external_ref)))
    }

    /// The ledger's position in a record stream; 0 if it has none.
    #[boxed]
    pub async fn source_position(&self, context: &Context, source: &str) -> Answer<u64> {
        let request = pb::GetSourcePositionRequest {
            context: self.peer.context(context),
            source: source.to_owned(),
        };
        let answer = self.peer.call(request, call!(get_source_position));
        Ok(answer.await?.through_sequence)
    }

    /// True if the ledger has the batch, or a later one of its source.
    #[boxed]
    pub async fn has_sealed(&self, context: &Context, sealed: &SealedBatch) -> Answer<bool> {
        let position = self.source_position(context, &sealed.0.source).await?;
        Ok(position >= sealed.0.through_sequence)
    }

    fn read_or_zero(&self, value: Option<&common::Decimal>) -> Answer<Decimal> {
        number_or_zero(value).map_err(|what| self.peer.malformed_response(what))
    }

    fn read_hold(&self, hold: Option<pb::Hold>) -> Result<Hold, CallError> {
        let hold = hold.ok_or_else(|| self.peer.malformed_response("hold is missing"))?;
        let id = hold.hold_id.clone();
        read_hold(hold).map_err(|what| self.peer.malformed_response(format!("hold {id}: {what}")))
    }
}

fn read_hold(hold: pb::Hold) -> Result<Hold, String> {
    let status = HoldStatus::from_code(hold.status).ok_or("status is missing")?;
    let hold_id = Id128::parse(&hold.hold_id).ok_or("id is not a UUID")?;
    let amount = hold.amount.ok_or("amount is missing")?;
    let remaining = hold.remaining_amount.and_then(|left| left.amount);
    Ok(Hold {
        hold_id,
        parent: hold.parent_hold_id.as_deref().and_then(Id128::parse),
        subaccount_id: hold.subaccount_id,
        amount: number(amount.amount.as_ref())?,
        instrument_id: amount.currency_code,
        released: number_or_zero(hold.released.as_ref())?,
        remaining: number(remaining.as_ref())?,
        status,
        reason: hold.reason,
        created_at_us: hold.created_at.as_ref().map_or(0, timestamp_us),
    })
}

impl Batch {
    fn into_request(self, context: Option<common::RequestContext>) -> pb::CreateOperationsRequest {
        let scales = self.scales.into_iter();
        pb::CreateOperationsRequest {
            context,
            operations: self.operations.into_iter().map(new_operation).collect(),
            hold_steps: self.hold_steps.into_iter().map(hold_step).collect(),
            mode: pb::BatchMode::AllOrNothing.into(),
            source: self.source,
            first_sequence: self.first_sequence,
            through_sequence: self.through_sequence,
            instrument_scales: scales
                .map(|(instrument_id, decimals)| pb::InstrumentScale {
                    instrument_id,
                    decimals: decimals.into(),
                })
                .collect(),
        }
    }
}

fn new_operation(operation: Operation) -> pb::NewOperation {
    let postings = operation.postings.into_iter();
    pb::NewOperation {
        operation: Some(pb::Operation {
            operation_id: operation.operation_id,
            r#type: operation.operation_type.code(),
            user_id: operation.user_id,
            idempotency_key: operation.idempotency_key,
            external_ref: Some(operation.external_ref),
            awaits_chain: true,
            ..Default::default()
        }),
        postings: postings
            .map(|posting| pb::Posting {
                debit_subaccount_id: posting.debit,
                credit_subaccount_id: posting.credit,
                amount: to_amount(&posting.amount),
                hold_id: posting.hold.map(|id| id.to_string()),
                unsettled: posting.unsettled,
                ..Default::default()
            })
            .collect(),
    }
}

fn hold_step(step: HoldStep) -> pb::HoldStep {
    let (hold_id, reason) = (step.hold.to_string(), step.reason);
    let amount = step.amount.as_ref().and_then(to_amount);
    let change = match step.change {
        HoldChange::SplitFrom { parent } => Step::Split(pb::SplitHold {
            parent_hold_id: parent.to_string(),
            hold_id,
            amount,
            reason,
        }),
        HoldChange::Grow => Step::Grow(pb::GrowHold { hold_id, amount }),
        HoldChange::ReturnToParent => Step::ReturnToParent(pb::ReturnHold {
            hold_id,
            amount,
            reason,
        }),
        HoldChange::Shrink => Step::Shrink(pb::ShrinkHold {
            hold_id,
            amount,
            reason,
        }),
    };
    pb::HoldStep {
        step: Some(change),
        before_operation: step.before_operation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{InstrumentId, Minor};

    const HOLD: Id128 = Id128::from_u128(7);

    fn batch() -> Batch {
        let units = Amount {
            instrument: InstrumentId::new("BOND-1").unwrap(),
            decimals: 3,
            minor: Minor(1_500),
        };
        let change = |change, amount| HoldStep {
            before_operation: 1,
            hold: HOLD,
            change,
            amount,
            reason: String::new(),
        };
        Batch {
            operations: vec![Operation {
                operation_id: "op-1".to_owned(),
                operation_type: OperationType::TradeSell,
                user_id: "ann".to_owned(),
                idempotency_key: "t-1:sell".to_owned(),
                external_ref: "t-1".to_owned(),
                postings: vec![Posting {
                    debit: "ann:BOND-1".to_owned(),
                    credit: "system:reserve:BOND-1".to_owned(),
                    amount: units,
                    hold: Some(HOLD),
                    unsettled: false,
                }],
            }],
            hold_steps: vec![
                change(HoldChange::Grow, Some(Amount::rubles(Minor(1)))),
                change(HoldChange::Shrink, None),
            ],
            scales: vec![("BOND-1".to_owned(), 3)],
            source: "settlement-1".to_owned(),
            first_sequence: 4,
            through_sequence: 9,
        }
    }

    #[test]
    fn a_sealed_batch_round_trips_and_equal_batches_are_equal_bytes() {
        let sealed = SealedBatch::new(batch(), "settlement", "settlement:1:4-9");
        let bytes = sealed.to_bytes();
        assert_eq!(SealedBatch::from_bytes(&bytes), Some(sealed.clone()));
        let again = SealedBatch::new(batch(), "settlement", "settlement:1:4-9");
        assert_eq!(again.to_bytes(), bytes);
        assert_eq!(SealedBatch::from_bytes(b"\xff"), None);

        let request = sealed.0;
        let context = request.context.unwrap();
        assert_eq!(context.idempotency_key, "settlement:1:4-9");
        assert_eq!((request.first_sequence, request.through_sequence), (4, 9));
        let posting = &request.operations[0].postings[0];
        assert_eq!(posting.hold_id.as_deref(), Some(&*HOLD.to_string()));
        let amount = posting.amount.as_ref().unwrap();
        assert_eq!(amount.amount.as_ref().unwrap().value, "1.500");
        let [grow, shrink] = &request.hold_steps[..] else {
            panic!("two steps")
        };
        assert!(matches!(&grow.step, Some(Step::Grow(grow))
            if grow.amount.as_ref().unwrap().currency_code == "CFA-RUB"));
        assert!(matches!(&shrink.step, Some(Step::Shrink(shrink)) if shrink.amount.is_none()));
        assert_eq!(shrink.before_operation, 1);
    }

    #[test]
    fn a_hold_with_a_missing_field_is_refused() {
        let whole = pb::Hold {
            hold_id: HOLD.to_string(),
            subaccount_id: "ann:CFA-RUB".to_owned(),
            amount: to_amount(&Amount::rubles(Minor(10_000))),
            remaining_amount: to_amount(&Amount::rubles(Minor(2_500))),
            status: pb::HoldStatus::Expired.into(),
            parent_hold_id: Some(String::new()),
            ..pb::Hold::default()
        };
        let read = read_hold(whole.clone()).unwrap();
        assert_eq!((read.hold_id, read.parent), (HOLD, None));
        assert!(read.is_money_available());
        assert_eq!(read.remaining, Decimal::from_minor(2_500, 2));
        assert_eq!(read.released, Decimal::ZERO);
        for broken in [
            pb::Hold {
                hold_id: "42".to_owned(),
                ..whole.clone()
            },
            pb::Hold {
                status: 0,
                ..whole.clone()
            },
            pb::Hold {
                remaining_amount: None,
                ..whole
            },
        ] {
            assert!(read_hold(broken).is_err());
        }
    }
}
