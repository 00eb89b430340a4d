//! Read set: keys of the rows that a group of commands needs, collected before the first read.
//!
//! Some keys are known only after other rows are loaded: rows to which a hold, a posting or a
//! stored answer refers. The loader adds them after each round, for example with
//! [`ReadSet::add_hold`].

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet},
};

use foldhash::fast::RandomState;
use types::{CFA_RUB, subaccount};

use super::{
    Batch, CallKey, Command, CommandKind, NewHold, NewOperation, StepKind, Target, lifecycle,
};
use crate::{
    book::ReferenceKey,
    model::{Call, Hold, Id, Operation, Posting, Scope},
    names::{self, SubAccountName},
};

/// Keys of rows to read.
#[derive(Debug, Default)]
pub struct ReadSet {
    pub operation_ids: BTreeSet<Id>,
    /// (user, key, scope), in the order of the commands, with duplicates.
    pub operation_keys: Vec<(Id, Id, i32)>,
    pub references: BTreeMap<(Id, i32), ReferenceKey>,
    pub tx_hashes: BTreeSet<Id>,
    pub hold_ids: BTreeSet<Id>,
    /// Unordered; the store sorts them to lock them.
    pub subaccount_ids: HashSet<Id, RandomState>,
    pub account_ids: BTreeSet<Id>,
    pub user_ids: BTreeSet<Id>,
    /// Users of whom all sub-accounts are needed.
    pub whole_users: BTreeSet<Id>,
    /// (user, key, call), in the order of the commands, with duplicates.
    pub answer_keys: Vec<(Id, Id, i32)>,
    pub sources: BTreeSet<Id>,
    pub pending_receipts: BTreeSet<Id>,
    /// No notices are parked, so none is looked up.
    pub no_notices: bool,
    /// None is parked by id, key or reference.
    pub no_named_notices: bool,
}

impl ReadSet {
    /// Adds the rows that a command names.
    pub fn add(&mut self, command: &Command) {
        command.for_each_hold(&mut |hold_id| {
            self.hold_ids.insert(hold_id.clone());
        });
        let key = command.key.as_ref().map(|key| key.key.clone());
        match &command.kind {
            CommandKind::Post(batch) => self.add_batch(batch, command.key.as_ref()),
            CommandKind::CreateHold(hold) => {
                self.add_new_hold(hold);
                if let (Some(user), Some(key)) = (super::accounts::owner(&hold.subaccount_id), key)
                {
                    self.add_answer(Call::CreateHold, user, key);
                }
            }
            CommandKind::ConsumeHold {
                operation_kind,
                external_ref,
                ..
            } => {
                if let Some(reference) = external_ref {
                    self.add_reference(*operation_kind, reference);
                    self.add_named_notice(|| {
                        lifecycle::target_key(&Target::Reference {
                            kind: *operation_kind,
                            external_ref: reference.clone(),
                        })
                    });
                }
            }
            CommandKind::Finalize { targets, .. } | CommandKind::Confirm { targets, .. } => {
                targets.iter().for_each(|target| self.add_target(target));
            }
            CommandKind::Receipt { tx_hash, .. } => {
                self.tx_hashes.insert(tx_hash.clone());
                self.add_tx_notice(tx_hash);
            }
            CommandKind::Reverse { operation_id, .. } => {
                self.operation_ids.insert(operation_id.clone());
            }
            CommandKind::SetStatus { subaccount_id, .. } => {
                self.add_subaccount(subaccount_id);
                if let (Some(user), Some(key)) = (super::accounts::owner(subaccount_id), key) {
                    self.add_answer(Call::SetSubAccountStatus, user, key);
                }
            }
            CommandKind::CreateUser { user_id } | CommandKind::BlockUser { user_id, .. } => {
                self.add_subaccount(&subaccount::of_user(user_id, CFA_RUB).into());
                self.add_accounts(user_id);
                self.whole_users.insert(user_id.clone());
            }
            CommandKind::RegisterInstrument { instrument_id, .. } => {
                self.add_subaccount(&subaccount::reserve(instrument_id).into())
            }
            CommandKind::SetLimit { .. } | CommandKind::RemoveLimit { .. } => {
                let call = if matches!(&command.kind, CommandKind::SetLimit { .. }) {
                    Call::SetVelocityLimit
                } else {
                    Call::RemoveVelocityLimit
                };
                if let Some(key) = &command.key {
                    self.add_answer(call, key.user_id.clone(), key.key.clone());
                }
            }
            CommandKind::ReleaseHold { .. }
            | CommandKind::AdjustHold { .. }
            | CommandKind::ExpireHolds(_)
            | CommandKind::PurgePendingReceipts { .. } => {}
        }
    }

    fn add_batch(&mut self, batch: &Batch, key: Option<&CallKey>) {
        for operation in batch.operations.iter().flatten() {
            self.add_new_operation(operation);
            if batch.from_event {
                let (user, key) = (&operation.user_id, &operation.idempotency_key);
                self.add_operation_key(Scope::Event, user, key);
            }
        }
        for step in batch.steps.iter().flatten() {
            if let StepKind::Open(hold) = &step.kind {
                self.add_new_hold(hold);
            }
        }
        self.sources
            .extend(batch.source.iter().map(|source| source.name.clone()));
        for (instrument_id, _) in &batch.scales {
            self.add_subaccount(&subaccount::reserve(instrument_id).into());
        }
        if let Some(key) = key.filter(|_| batch.source.is_none() && !batch.single) {
            self.add_answer(Call::CreateOperations, key.user_id.clone(), key.key.clone());
        }
    }

    fn add_target(&mut self, target: &Target) {
        self.add_named_notice(|| lifecycle::target_key(target));
        match target {
            Target::Id(id) => {
                self.operation_ids.insert(id.clone());
            }
            Target::Key { user_id, key } => self.add_operation_key(Scope::Create, user_id, key),
            Target::Reference { kind, external_ref } => self.add_reference(*kind, external_ref),
        }
    }

    /// Adds the rows that depend on the loaded holds and operations of a command.
    pub fn add_dependent(
        &mut self,
        command: &Command,
        hold: impl Fn(&Id) -> Option<Hold>,
        operation: impl Fn(&Id) -> Option<Operation>,
    ) {
        let Some(key) = command.key.as_ref().map(|key| key.key.clone()) else {
            return;
        };
        let owner = |hold_id: &Id| Some(hold(hold_id)?.terms.user_id.clone());
        let (call, user) = match &command.kind {
            CommandKind::ReleaseHold { hold_id, .. } => (Call::ReleaseHold, owner(hold_id)),
            CommandKind::AdjustHold { hold_id, .. } => (Call::AdjustHold, owner(hold_id)),
            CommandKind::ConsumeHold { hold_id, .. } => {
                let user = owner(hold_id);
                if let Some(user) = &user {
                    self.add_operation_key(Scope::Consume, user, &key);
                }
                (Call::ConsumeHold, user)
            }
            CommandKind::Reverse { operation_id, .. } => {
                let user = operation(operation_id).map(|operation| operation.terms.user_id.clone());
                if let Some(user) = &user {
                    self.add_operation_key(Scope::Reverse, user, &key);
                }
                (Call::ReverseOperation, user)
            }
            _ => return,
        };
        if let Some(user) = user {
            self.add_answer(call, user, key);
        }
    }

    /// Adds the rows that a loaded hold refers to.
    pub fn add_hold(&mut self, hold: &Hold) {
        self.add_subaccount(&hold.terms.subaccount_id);
        if let Some(destination) = &hold.terms.destination_subaccount_id {
            self.add_subaccount(destination);
        }
        self.hold_ids.extend(hold.terms.parent_hold_id.clone());
    }

    pub fn add_posting(&mut self, posting: &Posting) {
        self.add_subaccount(&posting.debit_subaccount_id);
        self.add_subaccount(&posting.credit_subaccount_id);
    }

    fn add_new_operation(&mut self, new: &NewOperation) {
        self.operation_ids.extend(new.operation_id.clone());
        self.add_operation_key(Scope::Create, &new.user_id, &new.idempotency_key);
        self.add_answer(
            Call::CreateOperation,
            new.user_id.clone(),
            new.idempotency_key.clone(),
        );
        let reference = new
            .external_ref
            .as_ref()
            .map(|reference| (new.kind, reference));
        if let Some((kind, reference)) = reference {
            self.add_reference(kind, reference);
        }
        if !self.no_named_notices {
            self.pending_receipts
                .extend(lifecycle::new_operation_receipt_keys(
                    &new.user_id,
                    &new.idempotency_key,
                    reference,
                    None,
                ));
        }
        if let Some(tx_hash) = &new.tx_hash {
            self.add_tx_notice(tx_hash);
        }
        for posting in &new.postings {
            for id in [&posting.debit_subaccount_id, &posting.credit_subaccount_id] {
                match names::routed(id, &posting.amount.instrument_id) {
                    Cow::Borrowed(_) => self.add_subaccount(id),
                    Cow::Owned(own) => self.add_subaccount(&own.into()),
                }
            }
        }
    }

    fn add_new_hold(&mut self, new: &NewHold) {
        self.add_subaccount(&new.subaccount_id);
    }

    fn add_operation_key(&mut self, scope: Scope, user_id: &Id, key: &Id) {
        let key = (user_id.clone(), key.clone(), scope.code());
        self.operation_keys.push(key);
    }

    fn add_answer(&mut self, call: Call, user_id: Id, key: Id) {
        self.answer_keys.push((user_id, key, call.code()));
    }

    fn add_reference(&mut self, kind: crate::model::OperationType, external_ref: &Id) {
        self.references.insert(
            (external_ref.clone(), kind.code()),
            (kind, external_ref.clone()),
        );
    }

    /// Adds a notice by id, key or reference.
    fn add_named_notice(&mut self, key: impl FnOnce() -> Id) {
        if !self.no_named_notices {
            self.pending_receipts.insert(key());
        }
    }

    fn add_tx_notice(&mut self, tx_hash: &Id) {
        if !self.no_notices {
            self.pending_receipts.insert(lifecycle::tx_key(tx_hash));
        }
    }

    fn add_subaccount(&mut self, subaccount_id: &Id) {
        if !self.subaccount_ids.contains(subaccount_id)
            && SubAccountName::parse(subaccount_id).is_some()
        {
            self.subaccount_ids.insert(subaccount_id.clone());
        }
    }

    /// Adds account and user of each sub-account that is not loaded and may have to be created.
    pub fn add_owners(&mut self, is_loaded: impl Fn(&Id) -> bool) {
        for id in self.subaccount_ids.iter().filter(|id| !is_loaded(id)) {
            if let Some(name) = SubAccountName::parse(id) {
                self.user_ids.insert(name.user_id.into());
                self.account_ids
                    .insert(names::account_id(name.user_id, name.account_type()).into());
            }
        }
    }

    fn add_accounts(&mut self, user_id: &Id) {
        use crate::model::AccountType::{Invest, Main};
        self.user_ids.insert(user_id.clone());
        for kind in [Main, Invest] {
            self.account_ids
                .insert(names::account_id(user_id, kind).into());
        }
    }
}

impl Command {
    /// Calls `visit` with every hold id of the command.
    pub fn for_each_hold(&self, visit: &mut dyn FnMut(&Id)) {
        match &self.kind {
            CommandKind::Post(batch) => {
                for operation in batch.operations.iter().flatten() {
                    operation
                        .postings
                        .iter()
                        .flat_map(|posting| &posting.hold_id)
                        .for_each(&mut *visit);
                }
                for step in batch.steps.iter().flatten() {
                    match &step.kind {
                        StepKind::Open(hold) => hold.hold_id.iter().for_each(&mut *visit),
                        StepKind::Split {
                            parent_hold_id,
                            hold_id,
                            ..
                        } => {
                            visit(parent_hold_id);
                            visit(hold_id);
                        }
                        StepKind::Grow { hold_id, .. }
                        | StepKind::Return { hold_id, .. }
                        | StepKind::Shrink { hold_id, .. }
                        | StepKind::Spend { hold_id, .. } => visit(hold_id),
                    }
                }
            }
            CommandKind::CreateHold(hold) => hold.hold_id.iter().for_each(visit),
            CommandKind::ReleaseHold { hold_id, .. }
            | CommandKind::ConsumeHold { hold_id, .. }
            | CommandKind::AdjustHold { hold_id, .. } => {
                visit(hold_id);
            }
            CommandKind::ExpireHolds(hold_ids) => hold_ids.iter().for_each(visit),
            _ => {}
        }
    }

    /// Calls `visit` with every instrument whose decimals the command may bind, or needs without a
    /// sub-account.
    pub fn for_each_scale(&self, visit: &mut dyn FnMut(&Id)) {
        match &self.kind {
            CommandKind::Post(batch) => batch
                .scales
                .iter()
                .for_each(|(instrument_id, _)| visit(instrument_id)),
            CommandKind::RegisterInstrument { instrument_id, .. } => visit(instrument_id),
            CommandKind::SetLimit { limit, .. } => visit(&limit.instrument_id),
            _ => {}
        }
    }
}
