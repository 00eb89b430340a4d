//! State shared by the gateway's modules: trading path, replica, history, service clients.

use std::sync::Arc;
use std::time::Duration;

use admission::{KeyedCall, NewRequest, Reject, RejectDetails, Request};
use replica::{Hold, Replica, State};
use sequencer::{Commit, Port, Record, SubmitError};
use service_clients::{CfaClient, LedgerClient, LimitType};
use service_kit::KeyedMutex;
pub use service_kit::clock::{monotonic_ns, now_ns, now_us};
use tokio::sync::Semaphore;
use tonic::Status;
use types::command::SetBudget;
use types::{
    Amount, AssetIx, CFA_RUB, Command, Decimal, Id128, InstrumentId, InstrumentIx, InstrumentSpec,
    Minor, NodeId, Phase, RejectReason, Sequence, Side, Ticks, UserId, UserIx, subaccount,
};

use crate::acts::Acts;
use crate::budget::Budgets;
use crate::config::GatewayConfig;
use crate::front::FrontQueue;
use crate::front::balances::Balances;
use crate::identity::Identity;
use crate::projection::rows::AnswerRow;
use crate::projection::{Projection, repo};
use crate::refusal;

/// How long a cancel waits for the store to record its request.
const NOTE_WAIT: Duration = Duration::from_millis(50);
/// How long a call waits for another call that reads the same user's limit.
const LIMIT_WAIT: Duration = Duration::from_secs(1);
/// How long a call that changes something waits for the replica. Longer than a read
/// (`replica_wait_ms`): after UNAVAILABLE the caller does not know whether the call took effect.
const CALL_WAIT: Duration = Duration::from_secs(5);

pub use types::instrument::MONEY_DECIMALS;

/// A user may have at most one in this many of the node's slots for open orders.
const ORDERS_PER_USER_DIVISOR: u32 = 16;

/// This service's name in its calls, and the owner of its holds. Only the owner may release or
/// consume a hold (`design.md` 4).
pub const SOURCE: &str = "market";

/// State that all tasks of the gateway share.
pub struct Market {
    pub config: GatewayConfig,
    pub node: NodeId,
    pub port: Port,
    pub commit: Commit,
    pub replica: Replica,
    /// Queue to the front.
    pub front: FrontQueue,
    /// Ledger balances that the front is to send.
    pub balances: Balances,
    pub projection: Projection,
    pub acts: Acts,
    pub ledger: LedgerClient,
    pub identity: Identity,
    pub cfa: CfaClient,
    pub budgets: Budgets,
    /// Serializes the reads of a user's limit, so that the last value read is the last journalled.
    pub limits: KeyedMutex<UserIx>,
    /// Serializes the changes of a user's trading holds.
    pub funding: KeyedMutex<UserIx>,
    /// Permits for concurrent journal scans.
    pub scans: Arc<Semaphore>,
    /// Serializes the releases of a hold in the ledger. Each compares journal and ledger, then
    /// releases the difference.
    pub releases: KeyedMutex<Id128>,
}

/// An asset, with the instrument that defines its id and decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asset {
    pub ix: AssetIx,
    /// Instrument of the units; `None` for money.
    pub instrument: Option<InstrumentSpec>,
}

impl Asset {
    pub const MONEY: Self = Self {
        ix: AssetIx::MONEY,
        instrument: None,
    };

    pub fn units(spec: InstrumentSpec) -> Self {
        Self {
            ix: AssetIx::units(spec.ix),
            instrument: Some(spec),
        }
    }

    pub fn id(&self) -> &str {
        self.instrument
            .as_ref()
            .map_or(CFA_RUB, |spec| spec.id.as_str())
    }

    pub fn decimals(&self) -> u8 {
        self.instrument
            .as_ref()
            .map_or(MONEY_DECIMALS, |spec| spec.decimals)
    }

    /// True for units of an issue that has matured or is redeemed: its trading has ended for good.
    pub fn is_matured(&self) -> bool {
        self.instrument
            .is_some_and(|spec| spec.phase == Phase::Matured)
    }

    pub fn subaccount(&self, user_id: &str) -> String {
        subaccount::of_user(user_id, self.id())
    }

    pub fn amount(&self, minor: Minor) -> Amount {
        match &self.instrument {
            None => Amount::rubles(minor),
            Some(spec) => spec.amount(minor),
        }
    }

    /// Converts another service's amount to minor units.
    pub fn minor(&self, amount: Decimal) -> Result<Minor, Status> {
        let minor = amount.to_minor(self.decimals());
        minor.map(Minor).map_err(refusal::internal)
    }
}

impl Market {
    /// Instrument with an index, as of the replica's position. Cheap enough for every order.
    pub fn spec(&self, instrument: InstrumentIx) -> Option<InstrumentSpec> {
        self.replica.names().find_instrument(instrument)
    }

    /// Submits a request to the trading path. The returned record is *accepted*, not yet durable.
    /// What it charges to a user's budget is subtracted from the front's estimate.
    pub async fn submit(&self, request: Request) -> Result<Record, SubmitError> {
        let record = self.port.call(request).await?;
        let (user, charged) = match &record.command.command {
            Command::New(new) => (new.user, new.budget_minor),
            Command::Amend(amend) => (amend.user, amend.budget_minor),
            _ => return Ok(record),
        };
        if !charged.is_zero() {
            self.budgets.of_user(user).charge(charged);
        }
        Ok(record)
    }

    /// Submits a request and waits until its command is durable.
    pub async fn submit_durable(&self, request: Request) -> Result<Record, Status> {
        let record = self.submit(request).await;
        let record = record.map_err(|error| refusal::submit_error(&error))?;
        self.await_durable(record.command.sequence).await?;
        Ok(record)
    }

    /// Like [`Self::submit_durable`], but `None` for a refusal with one of the reasons in `unless`.
    pub async fn submit_unless(
        &self,
        request: Request,
        unless: &[RejectReason],
    ) -> Result<Option<Record>, Status> {
        match self.submit(request).await {
            Ok(record) => {
                self.await_durable(record.command.sequence).await?;
                Ok(Some(record))
            }
            Err(SubmitError::Refused(reject)) if unless.contains(&reject.reason) => Ok(None),
            Err(error) => Err(refusal::submit_error(&error)),
        }
    }

    /// Waits for the history to reach the last assigned sequence. A reader then sees everything
    /// that an earlier report or hint stated (R178).
    ///
    /// # Errors
    /// As [`Self::await_history`].
    pub async fn await_fresh_history(&self) -> Result<(), Status> {
        self.await_history(self.replica.assigned()).await
    }

    /// Returns when the sequence is durable.
    pub async fn await_durable(&self, sequence: Sequence) -> Result<(), Status> {
        let durable = self.commit.wait(sequence).await;
        durable.map_err(refusal::internal)
    }

    /// Reads the replica's state after the last assigned sequence; all of it is durable. For calls
    /// that change something: waits up to [`CALL_WAIT`].
    pub async fn state<T>(&self, read: impl FnOnce(&State) -> T) -> Result<T, Status> {
        let state = self.replica.read_fresh(CALL_WAIT, read).await;
        state.map_err(refusal::replica_behind)
    }

    /// Like [`Self::state`], for read-only calls: waits up to `replica_wait_ms`, then fails rather
    /// than return old data (R178).
    pub async fn query<T>(&self, read: impl FnOnce(&State) -> T) -> Result<T, Status> {
        let wait = Duration::from_millis(self.config.replica_wait_ms);
        let state = self.replica.read_fresh(wait, read).await;
        state.map_err(refusal::replica_behind)
    }

    /// The journal's state of a ledger hold, as of the replica's position.
    pub fn hold_of(&self, hold_id: Id128) -> Option<Hold> {
        self.replica.read(|state| state.hold_of(hold_id))
    }

    /// Returns when the history has the record. Waits at most `read_wait_ms`.
    ///
    /// # Errors
    /// UNAVAILABLE `HISTORY_BEHIND` with the records that the history lacks.
    pub async fn await_history(&self, sequence: Sequence) -> Result<(), Status> {
        let written = self.unless_ended(self.projection.wait(sequence));
        let written = tokio::time::timeout(self.read_wait(), written).await;
        written.unwrap_or_else(|_| {
            let position = self.projection.position();
            match sequence.get().saturating_sub(position.get()) {
                0 => Ok(()),
                lag => Err(refusal::history_behind(lag)),
            }
        })
    }

    /// Longest wait of a call for the history or its file.
    pub fn read_wait(&self) -> Duration {
        Duration::from_millis(self.config.read_wait_ms)
    }

    /// Reads from the history's file, or writes to it, within `read_wait_ms`.
    ///
    /// # Errors
    /// UNAVAILABLE if the file is locked for longer.
    pub async fn access_store<T>(
        &self,
        access: impl Future<Output = Result<T, crate::Error>>,
    ) -> Result<T, Status> {
        let done = tokio::time::timeout(self.read_wait(), access).await;
        let done = done.map_err(|_| refusal::store_busy())?;
        done.map_err(refusal::internal)
    }

    /// Waits, but fails when the replica has ended: nothing that follows it advances then.
    pub async fn unless_ended(&self, waiting: impl Future<Output = ()>) -> Result<(), Status> {
        tokio::select! {
            biased;
            () = waiting => Ok(()),
            reason = self.replica.ended() => {
                // Debug level: the end itself is logged, and repeated calls could flood the log.
                tracing::debug!(reason, "replica ended: the call cannot be answered");
                Err(refusal::submit_error(&SubmitError::Stopping))
            }
        }
    }

    /// Returns when the replica has applied the record.
    pub async fn await_applied(&self, sequence: Sequence) -> Result<(), Status> {
        let passed = self.replica.wait(sequence).await;
        passed.map_err(refusal::internal)
    }

    /// Returns when the journal records that the ledger has every posting through `sequence`.
    ///
    /// Money that a Defund or CloseHold at `sequence` took out of a hold may be released in the
    /// ledger only after that. Before, the hold of an order may still contain some of it.
    pub async fn await_posted(&self, sequence: Sequence) -> Result<(), Status> {
        let posted = self.replica.wait_posted(sequence).await;
        posted.map_err(refusal::internal)
    }

    /// Whether [`Self::await_posted`] would return at once.
    pub fn is_posted(&self, sequence: Sequence) -> bool {
        self.replica.settlement().posted >= sequence
    }

    /// The instrument with an id. Fails with `Instrument not found`.
    pub async fn instrument(&self, instrument_id: &str) -> Result<InstrumentSpec, Status> {
        refusal::check_not_empty("instrument_id", instrument_id)?;
        let id = InstrumentId::new(instrument_id).map_err(|_| refusal::instrument_not_found())?;
        let names = self.replica.names();
        if let Some(spec) = names.instrument_of(&id) {
            return Ok(spec);
        }
        // The instrument may have been registered just now: wait for the replica.
        self.state(|_| ()).await?;
        let spec = names.instrument_of(&id);
        spec.ok_or_else(refusal::instrument_not_found)
    }

    /// An asset by id: `CFA-RUB` or an instrument.
    pub async fn asset(&self, instrument_id: &str) -> Result<Asset, Status> {
        if instrument_id == CFA_RUB {
            return Ok(Asset::MONEY);
        }
        self.instrument(instrument_id).await.map(Asset::units)
    }

    /// An asset by the index in a hold or an effect.
    pub fn asset_of(&self, asset: AssetIx) -> Asset {
        let instrument = asset.instrument();
        instrument.map_or(Asset::MONEY, |ix| {
            Asset::units(self.replica.names().instrument(ix))
        })
    }

    /// True if the user has an index.
    pub fn is_bound(&self, user_id: &str) -> bool {
        let id = UserId::new(user_id).ok();
        id.is_some_and(|id| self.replica.names().user_ix(&id).is_some())
    }

    /// The user's index. Binds the user first if necessary.
    pub async fn bind_user(&self, user_id: &str) -> Result<UserIx, Status> {
        let id = UserId::new(user_id)
            .map_err(|error| rpc::status::invalid_argument("user_id", error.to_string()))?;
        if let Some(user) = self.replica.names().user_ix(&id) {
            return Ok(user);
        }
        match self.submit(Request::BindUser(id)).await {
            Ok(record) => match record.command.command {
                Command::BindUser(bound) => Ok(bound.user),
                _ => unreachable!("BindUser is journalled as BindUser"),
            },
            Err(SubmitError::Refused(reject)) => match reject.details {
                RejectDetails::User(user) => Ok(user),
                _ => Err(refusal::refused(&reject)),
            },
            Err(error) => Err(refusal::submit_error(&error)),
        }
    }

    /// A user's open trading hold for an asset.
    pub async fn default_hold(
        &self,
        user: UserIx,
        asset: AssetIx,
    ) -> Result<Option<(types::HoldIx, admission::HoldBalance)>, Status> {
        self.state(|state| {
            let admission = state.core().admission();
            let hold = admission.default_hold(user, asset)?;
            Some((hold, *admission.hold(hold)?))
        })
        .await
    }

    /// Returns when the history has the complete answer to a call with a key. If the call continues
    /// in slices, the answer counts the orders of all slices.
    ///
    /// # Errors
    /// As [`Self::await_history`].
    async fn await_answer(&self, key_hash: Id128, mut call: KeyedCall) -> Result<(), Status> {
        loop {
            self.await_durable(call.sequence).await?;
            self.await_history(call.sequence).await?;
            let (passed, is_sweeping, last) = self.replica.read(|state: &State| {
                let admission = state.core().admission();
                let last = admission
                    .keyed_call(key_hash)
                    .map_or(call.sequence, |call| call.sequence);
                let is_sweeping = admission.is_sweeping(call.sequence);
                (state.core().sequence(), is_sweeping, last)
            });
            if is_sweeping {
                self.await_applied(passed.next()).await?;
            } else if last == call.sequence {
                return Ok(());
            } else {
                call.sequence = last;
            }
        }
    }

    /// The earlier answer under a key, once the history has it. Does not find a call whose command
    /// is in flight. Admission refuses the repeat of such a call; then use [`Market::answered_by`].
    pub async fn answered(&self, key_hash: Id128) -> Result<Option<AnswerRow>, Status> {
        let call = |state: &State| state.core().admission().keyed_call(key_hash);
        loop {
            let known = self.replica.read(call);
            if let Some(call) = known {
                self.await_answer(key_hash, call).await?;
            }
            let answer = repo::answer(&self.projection.db, key_hash);
            let answer = self.access_store(answer).await?;
            // The command has left flight since the first read: the row may lack later slices.
            let has_begun = known.is_none() && self.replica.read(call).is_some();
            if answer.is_none() || !has_begun {
                return Ok(answer);
            }
        }
    }

    /// Like [`Self::answered`], for a call that reduces risk: the call proceeds when the store is
    /// slow. Admission still refuses repeats of keys of the last day.
    pub async fn reduction_answered(&self, key_hash: Id128) -> Option<AnswerRow> {
        match tokio::time::timeout(NOTE_WAIT, self.answered(key_hash)).await {
            Ok(Ok(answer)) => answer,
            failed => {
                tracing::warn!(
                    ?failed,
                    "store too slow: a cancel proceeds without a check for an earlier answer"
                );
                None
            }
        }
    }

    /// The answer to the call whose repeat admission refused.
    pub async fn answered_by(
        &self,
        reject: &Reject,
        key_hash: Id128,
    ) -> Result<Option<AnswerRow>, Status> {
        if let RejectDetails::Request(call) = reject.details {
            self.await_answer(key_hash, call).await?;
        }
        self.answered(key_hash).await
    }

    /// Records that a call was answered, so that a late repeat does nothing. Needed for a call that
    /// changed nothing, whose key the journal does not have. Does not change an answer that the
    /// history already has.
    pub async fn note_answered(&self, key_hash: Id128) -> Result<(), Status> {
        self.access_store(repo::note_answer(&self.projection.db, key_hash))
            .await
    }

    /// Upper limit of `open_orders_per_user` (`design.md` 7).
    pub fn open_orders_per_user_max(&self) -> u32 {
        let orders_max = |state: &State| state.core().admission().orders_max();
        self.replica.read(orders_max) / ORDERS_PER_USER_DIVISOR
    }

    /// Stores the data of a call that its command does not contain: the correlation id, and
    /// `client_order` (user, number and text of the client's order id).
    pub async fn note_request(
        &self,
        context: &rpc::Context,
        key_hash: Id128,
        client_order: Option<(&str, u64, &str)>,
    ) -> Result<(), Status> {
        let (db, id) = (&self.projection.db, &context.correlation_id);
        let noting = repo::note_request(db, key_hash, id, client_order, now_us());
        self.access_store(noting).await
    }

    /// Like [`Self::note_request`], for a call that reduces risk: the call proceeds when the store
    /// is slow.
    pub async fn note_reduction(&self, context: &rpc::Context, key_hash: Id128) {
        let noting = self.note_request(context, key_hash, None);
        let noted = tokio::time::timeout(NOTE_WAIT, noting).await;
        if !matches!(noted, Ok(Ok(()))) {
            let id = &context.correlation_id;
            tracing::warn!(
                id,
                "store too slow: a cancel proceeds, its correlation id is not stored"
            );
        }
    }

    /// The Moscow day by which admission judges an order now.
    pub fn day(&self) -> u32 {
        self.day_before(0)
    }

    /// The Moscow day of some nanoseconds ago.
    pub fn day_before(&self, ns: u64) -> u32 {
        admission::moscow_day(self.port.time_ns().saturating_sub(ns))
    }

    /// Locks the user's trading holds for one change.
    pub async fn lock_funding(&self, user: UserIx) -> tokio::sync::OwnedMutexGuard<()> {
        self.funding.lock(user).await
    }

    /// The price for the value of an order in limit checks. A sell trades at the best bid if that
    /// is above the order's own price.
    pub async fn valuation_price(&self, new: &NewRequest, price: Ticks) -> Result<Ticks, Status> {
        if new.side == Side::Buy {
            return Ok(price);
        }
        let quote = |state: &State| state.core().admission().quote(new.instrument);
        let bid = self.query(quote).await?.opposite(new.side);
        Ok(bid.map_or(price, |bid| bid.max(price)))
    }

    /// Reads the user's KYC level and day limit from identity, journals the limit, and sets the
    /// front's estimate. Does nothing if another call has done so meanwhile.
    ///
    /// # Errors
    /// UNAVAILABLE if another call reads the same limit for longer than [`LIMIT_WAIT`]. The wait is
    /// bounded so that the sessions of a user do not all wait for an identity that does not answer.
    pub async fn refresh_budget(
        &self,
        context: &rpc::Context,
        user: UserIx,
        user_id: &str,
    ) -> Result<(), Status> {
        let budget = self.budgets.of_user(user);
        let before = budget.version();
        let lock = tokio::time::timeout(LIMIT_WAIT, self.limits.lock(user)).await;
        let _lock = lock.map_err(|_| refusal::limit_read_in_progress())?;
        if budget.version() == before && !budget.is_stale(self.day()) {
            return Ok(());
        }
        self.read_kyc(context, user, user_id).await?;
        self.read_limit(context, user, user_id).await
    }

    /// Reads a user that changed in identity: the KYC level, and the limit if the user has a budget
    /// today or an open session. Admission alone checks the user's RPC orders and amends against
    /// the limit, and gets a new one only here.
    ///
    /// # Errors
    /// Identity, the trading path or the replica is unavailable. NOT_FOUND: identity does not know
    /// the user.
    pub async fn refresh_user(&self, user: UserIx) -> Result<(), Status> {
        let user_id = self.replica.names().user(user);
        let mut context = rpc::Context::new(SOURCE);
        context.user_id = user_id.to_string();
        let _lock = self.limits.lock(user).await;
        self.read_kyc(&context, user, &context.user_id).await?;
        let day = self.day();
        let has_budget = self.state(|state| {
            let row = state.core().admission().user(user);
            row.is_some_and(|row| row.budget.day == day)
        });
        match has_budget.await? || self.budgets.is_in_session(user) {
            true => self.read_limit(&context, user, &context.user_id).await,
            false => Ok(()),
        }
    }

    /// Reads the user's KYC level for the sessions: one that is too low stops their new orders and
    /// amends (R146). The caller holds the user's lock in `limits`, so that the last level read is
    /// the last stored.
    async fn read_kyc(
        &self,
        context: &rpc::Context,
        user: UserIx,
        user_id: &str,
    ) -> Result<(), Status> {
        let profile = self.identity.profile(context, user_id).await?;
        let is_too_low = !profile.is_standard;
        if self.budgets.of_user(user).set_kyc_too_low(is_too_low) {
            tracing::info!(user_id, is_too_low, "KYC level for session orders changed");
        }
        Ok(())
    }

    /// Reads the day limit from identity, journals it, and sets the front's estimate. The caller
    /// holds the user's lock in `limits`.
    async fn read_limit(
        &self,
        context: &rpc::Context,
        user: UserIx,
        user_id: &str,
    ) -> Result<(), Status> {
        let version = self.budgets.of_user(user).version();
        // The day is read before the call. If the day changes during the call, the limit of the new
        // day is journalled for the ended day, which no later order uses.
        let day = self.day();
        let limits = &self.identity.client;
        let today = limits
            .day_limit(context, user_id, LimitType::Trading)
            .await?;
        let request = Request::SetBudget(SetBudget {
            user,
            day,
            limit_minor: today.limit,
            left_minor: today.left,
        });
        match self.submit(request).await {
            Ok(_) => {}
            // The limit is as before.
            Err(SubmitError::Refused(reject))
                if reject.reason == RejectReason::DuplicateRequest => {}
            Err(error) => return Err(refusal::submit_error(&error)),
        }
        self.set_budget(user, day, version).await
    }

    /// Sets the front's estimate to what admission has left for the user on a day.
    pub async fn read_budget(&self, user: UserIx, day: u32) -> Result<(), Status> {
        let version = self.budgets.of_user(user).version();
        self.set_budget(user, day, version).await
    }

    async fn set_budget(&self, user: UserIx, day: u32, version: u32) -> Result<(), Status> {
        let left = self.state(|state| {
            let row = state.core().admission().user(user);
            row.map_or(Minor::ZERO, |row| row.budget.left(day))
        });
        self.budgets.of_user(user).set(left.await?, day, version);
        Ok(())
    }
}
