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
    Amount, AssetIx, CFA_RUB, Decimal, Id128, InstrumentId, InstrumentIx, InstrumentSpec, Minor,
    NodeId, RejectReason, Sequence, Side, Ticks, UserId, UserIx, subaccount,
};

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
/// How long a call waits for another one that reads the same user's limit.
const LIMIT_WAIT: Duration = Duration::from_secs(1);
/// How long a call that changes something waits for the replica. Longer than a read (100 ms): with
/// UNAVAILABLE the caller would not know whether it took effect.
const CALL_WAIT: Duration = Duration::from_secs(5);

pub use types::instrument::MONEY_DECIMALS;

/// Divisor of the node's slots for open orders: a user may take at most a sixteenth.
const USER_PART: u32 = 16;

/// This service's name in its calls, and the owner of its holds: no other service may release or
/// consume them (`design.md` 4).
pub const SOURCE: &str = "market";

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
    pub ledger: LedgerClient,
    pub identity: Identity,
    pub cfa: CfaClient,
    pub budgets: Budgets,
    /// One read of a user's limit at a time: the last one journalled is the last one read.
    pub limits: KeyedMutex<UserIx>,
    /// Serializes the changes of a user's trading holds.
    pub funding: KeyedMutex<UserIx>,
    /// Bounds concurrent journal scans.
    pub scans: Arc<Semaphore>,
    /// Serializes the releases of a hold in the ledger: each reads both sides, then releases the
    /// difference.
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
    /// Instrument with an index, from the durable part of the journal. Cheap enough for every
    /// order.
    pub fn spec(&self, instrument: InstrumentIx) -> Option<InstrumentSpec> {
        self.replica.names().find_instrument(instrument)
    }

    /// Submits a request to the trading path. The answer is *accepted*, not yet durable.
    pub async fn submit(&self, request: Request) -> Result<Record, SubmitError> {
        self.port.call(request).await
    }

    /// Submits a request and waits until its command is durable.
    pub async fn submit_durable(&self, request: Request) -> Result<Record, Status> {
        let record = self.submit(request).await;
        let record = record.map_err(|error| refusal::submit_error(&error))?;
        self.durable(record.command.sequence).await?;
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
                self.durable(record.command.sequence).await?;
                Ok(Some(record))
            }
            Err(SubmitError::Refused(reject)) if unless.contains(&reject.reason) => Ok(None),
            Err(error) => Err(refusal::submit_error(&error)),
        }
    }

    /// Waits for the history to reach the last assigned sequence, so that a reader sees what any
    /// earlier report or hint stated (R178).
    ///
    /// # Errors
    /// As [`Self::await_history`].
    pub async fn fresh(&self) -> Result<(), Status> {
        self.await_history(self.replica.assigned()).await
    }

    /// Returns when the journal has the sequence on disk.
    pub async fn durable(&self, sequence: Sequence) -> Result<(), Status> {
        let durable = self.commit.wait(sequence).await;
        durable.map_err(refusal::internal)
    }

    /// Reads the replica's state after the last assigned sequence; all of it is durable.
    pub async fn state<T>(&self, read: impl FnOnce(&State) -> T) -> Result<T, Status> {
        let state = self.replica.read_fresh(CALL_WAIT, read).await;
        state.map_err(refusal::replica_behind)
    }

    /// Like [`Self::state`], for a read-only call that fails rather than return old data (R178).
    pub async fn look<T>(&self, read: impl FnOnce(&State) -> T) -> Result<T, Status> {
        let patience = Duration::from_millis(self.config.replica_wait_ms);
        let state = self.replica.read_fresh(patience, read).await;
        state.map_err(refusal::replica_behind)
    }

    /// A ledger hold in the journal, as of the replica's position.
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
    pub async fn stored<T>(
        &self,
        access: impl Future<Output = Result<T, crate::Error>>,
    ) -> Result<T, Status> {
        let done = tokio::time::timeout(self.read_wait(), access).await;
        let done = done.map_err(|_| refusal::store_busy())?;
        done.map_err(refusal::internal)
    }

    /// Waits, but fails when the replica has ended: its position moves no further.
    pub async fn unless_ended(&self, waiting: impl Future<Output = ()>) -> Result<(), Status> {
        tokio::select! {
            biased;
            () = waiting => Ok(()),
            reason = self.replica.ended() => {
                // Debug: its end was logged, and callers could fill the log.
                tracing::debug!(reason, "replica ended: the call cannot be answered");
                Err(refusal::submit_error(&SubmitError::Stopping))
            }
        }
    }

    /// Returns when the replica has applied the record.
    pub async fn passed(&self, sequence: Sequence) -> Result<(), Status> {
        let passed = self.replica.wait(sequence).await;
        passed.map_err(refusal::internal)
    }

    /// Returns when the journal records that the ledger has every posting up to the record. Money
    /// that a Defund or CloseHold at `sequence` took out of a hold may be released in the ledger
    /// only then: before, part of it may still be in the hold of an order.
    pub async fn posted(&self, sequence: Sequence) -> Result<(), Status> {
        let posted = self.replica.wait_posted(sequence).await;
        posted.map_err(refusal::internal)
    }

    /// Whether [`Self::posted`] would return at once.
    pub fn is_posted(&self, sequence: Sequence) -> bool {
        self.replica.settlement().posted >= sequence
    }

    /// The instrument with an id. Fails with `Instrument not found`.
    pub async fn instrument(&self, instrument_id: &str) -> Result<InstrumentSpec, Status> {
        refusal::check_given("instrument_id", instrument_id)?;
        let id = InstrumentId::new(instrument_id).map_err(|_| refusal::instrument_not_found())?;
        let names = self.replica.names();
        if let Some(spec) = names.instrument_of(&id) {
            return Ok(spec);
        }
        // It may have been listed just now.
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

    /// The user's index. Binds the user first if necessary.
    pub async fn bind_user(&self, user_id: &str) -> Result<UserIx, Status> {
        let id = UserId::new(user_id)
            .map_err(|error| rpc::status::invalid_argument("user_id", error.to_string()))?;
        if let Some(user) = self.replica.names().user_ix(&id) {
            return Ok(user);
        }
        match self.submit(Request::BindUser(id)).await {
            Ok(record) => match record.command.command {
                types::Command::BindUser(bound) => Ok(bound.user),
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

    /// Returns when the history has the answer to a call with a key: the record of its command, or
    /// of the last slice where it continues in slices. That answer counts the orders of all slices.
    ///
    /// # Errors
    /// As [`Self::await_history`].
    async fn carried_out(&self, key_hash: Id128, mut call: KeyedCall) -> Result<(), Status> {
        loop {
            self.durable(call.sequence).await?;
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
                self.passed(passed.next()).await?;
            } else if last == call.sequence {
                return Ok(());
            } else {
                call.sequence = last;
            }
        }
    }

    /// The earlier answer under a key, once the history has it. Misses a call whose command is in
    /// flight: admission refuses its repeat ([`Market::answered_by`]).
    pub async fn answered(&self, key_hash: Id128) -> Result<Option<AnswerRow>, Status> {
        let call = |state: &State| state.core().admission().keyed_call(key_hash);
        loop {
            let known = self.replica.read(call);
            if let Some(call) = known {
                self.carried_out(key_hash, call).await?;
            }
            let answer = repo::answer(&self.projection.db, key_hash);
            let answer = self.stored(answer).await?;
            // A command that was in flight a moment ago: the row may lack its later slices.
            let has_begun = known.is_none() && self.replica.read(call).is_some();
            if answer.is_none() || !has_begun {
                return Ok(answer);
            }
        }
    }

    /// Like [`Self::answered`], for a call that reduces risk: it proceeds when the store is slow.
    /// Admission knows the keys of the last day.
    pub async fn reduction_answered(&self, key_hash: Id128) -> Option<AnswerRow> {
        match tokio::time::timeout(NOTE_WAIT, self.answered(key_hash)).await {
            Ok(Ok(answer)) => answer,
            silent => {
                tracing::warn!(
                    ?silent,
                    "store too slow: the cancel proceeds without its earlier answer"
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
            self.carried_out(key_hash, call).await?;
        }
        self.answered(key_hash).await
    }

    /// Records that a call was answered whose answer the journal may not have, because there was
    /// nothing left to do: a late repeat does nothing either. Where the journal has the key, the
    /// row only states that the call was answered.
    pub async fn note_answered(&self, key_hash: Id128) -> Result<(), Status> {
        self.stored(repo::note_answer(&self.projection.db, key_hash))
            .await
    }

    /// Upper limit of `open_orders_per_user` (`design.md` 7).
    pub fn open_orders_most(&self) -> u32 {
        let orders_max = |state: &State| state.core().admission().orders_max();
        self.replica.read(orders_max) / USER_PART
    }

    /// Stores what a call carries beyond its journalled command. `client_order`: user, number and
    /// text of the client's order id.
    pub async fn note_request(
        &self,
        context: &rpc::Context,
        key_hash: Id128,
        client_order: Option<(&str, u64, &str)>,
    ) -> Result<(), Status> {
        let (db, id) = (&self.projection.db, &context.correlation_id);
        let noting = repo::note_request(db, key_hash, id, client_order, now_us());
        self.stored(noting).await
    }

    /// Like [`Self::note_request`], for a call that reduces risk: it proceeds when the store is
    /// slow.
    pub async fn note_reduction(&self, context: &rpc::Context, key_hash: Id128) {
        let noting = self.note_request(context, key_hash, None);
        let noted = tokio::time::timeout(NOTE_WAIT, noting).await;
        if !matches!(noted, Ok(Ok(()))) {
            let id = &context.correlation_id;
            tracing::warn!(id, "store too slow: the cancel proceeds unrecorded");
        }
    }

    /// The Moscow day by which admission judges an order now.
    pub fn day(&self) -> u32 {
        admission::moscow_day(self.port.time_ns())
    }

    /// Locks the user's trading holds for one change.
    pub async fn funding_turn(&self, user: UserIx) -> tokio::sync::OwnedMutexGuard<()> {
        self.funding.lock(user).await
    }

    /// The price by which an order's value is judged: a sell trades at the best bid if that is
    /// above its own price.
    pub async fn price_to_trade(&self, new: &NewRequest, price: Ticks) -> Result<Ticks, Status> {
        if new.side == Side::Buy {
            return Ok(price);
        }
        let quote = |state: &State| state.core().admission().quote(new.instrument);
        let bid = self.look(quote).await?.opposite(new.side);
        Ok(bid.map_or(price, |bid| bid.max(price)))
    }

    /// Reads the user's day limit from identity, journals it, and reads what is left; nothing if
    /// another call has done so meanwhile.
    ///
    /// # Errors
    /// UNAVAILABLE while another call reads the same limit for long: not every session of a user
    /// waits for an identity that does not answer.
    pub async fn refresh_budget(
        &self,
        context: &rpc::Context,
        user: UserIx,
        user_id: &str,
    ) -> Result<(), Status> {
        let budget = self.budgets.of(user);
        let before = budget.mark();
        let turn = tokio::time::timeout(LIMIT_WAIT, self.limits.lock(user)).await;
        let _turn = turn.map_err(|_| refusal::limit_not_read())?;
        if budget.mark() == before && !budget.is_stale(self.day()) {
            return Ok(());
        }
        self.read_limit(context, user, user_id).await
    }

    /// Reads the limit of a user who has a budget today. Its orders by call, and its amends, are
    /// judged by admission alone, which learns of a change only in this way.
    pub async fn reset_budget(&self, user: UserIx) -> Result<(), Status> {
        let user_id = self.replica.names().user(user);
        let mut context = rpc::Context::new(SOURCE);
        context.user_id = user_id.to_string();
        let _turn = self.limits.lock(user).await;
        let day = self.day();
        let has_budget = self.state(|state| {
            let row = state.core().admission().user(user);
            row.is_some_and(|row| row.budget.day == day)
        });
        match has_budget.await? {
            true => self.read_limit(&context, user, &context.user_id).await,
            false => Ok(()),
        }
    }

    /// The caller has the user's lock.
    async fn read_limit(
        &self,
        context: &rpc::Context,
        user: UserIx,
        user_id: &str,
    ) -> Result<(), Status> {
        let mark = self.budgets.of(user).mark();
        // Before the call: identity may change the day meanwhile, and its figure is then too large
        // for a day that has ended.
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
        self.set_budget(user, day, mark).await
    }

    /// Reads what is left of the user's budget of a day, orders of all its sessions counted.
    pub async fn read_budget(&self, user: UserIx, day: u32) -> Result<(), Status> {
        let mark = self.budgets.of(user).mark();
        self.set_budget(user, day, mark).await
    }

    async fn set_budget(&self, user: UserIx, day: u32, mark: u32) -> Result<(), Status> {
        let left = self.state(|state| {
            let row = state.core().admission().user(user);
            row.map_or(Minor::ZERO, |row| row.budget.left(day))
        });
        self.budgets.of(user).set(left.await?, day, mark);
        Ok(())
    }
}
