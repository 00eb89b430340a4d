//! The reads of LedgerService. A user sees its own rows; staff and services see all (D32).
//!
//! Lists are newest first. An unknown filter value gives an empty list, not NOT_FOUND (D45). An id
//! or filter value that a write would reject is rejected here with the same error.

use proto::{convert::to_decimal, ledger::v1 as wire};
use rpc::{
    Caller,
    page::{self, Key, Page},
};
use tonic::{Response, Status};
use types::Decimal;

use super::{Api, convert, refused};
use crate::{
    Error,
    model::{HoldStatus, Operation, OperationStatus, OperationType, Posting, SubAccount},
    names::SubAccountName,
    refusal::Refusal,
    repo::{HoldFilter, OperationFilter, PageBound, SubAccountFilter, TrialBalance},
};

/// Maximum number of sub-account ids in a list request: a full page.
const SUBACCOUNT_IDS_MAX: usize = page::SIZE_MAX as usize;

type Answer<T> = Result<Response<T>, Status>;

pub(super) fn page_bound(page: &Page) -> PageBound<'_> {
    let (created_at_us, id) = page.bound();
    PageBound {
        created_at_us,
        id,
        limit: page.rows_limit(),
    }
}

pub(super) fn failed(error: Error) -> Status {
    super::failed(&error)
}

/// Checks the id of a requested object.
fn check_id(field: &str, text: &str) -> Result<(), Status> {
    convert::check_id(field, text).map_err(refused)
}

/// Checks the id in a filter of a list.
pub(super) fn check_id_filter(field: &str, text: &str) -> Result<(), Status> {
    convert::check_id_filter(field, text).map_err(refused)
}

/// Returns the user of a list. Empty means all users for staff and services, the caller for a user.
fn effective_user_id(caller: &Caller, user_id: String) -> Result<String, Status> {
    check_id_filter("user_id", &user_id)?;
    match &caller.user_id {
        Some(own) if user_id.is_empty() && !caller.acts_for_any_user() => Ok(own.clone()),
        _ => {
            caller.require_user(&user_id)?;
            Ok(user_id)
        }
    }
}

fn optional_enum<T>(
    code: i32,
    field: &str,
    from_code: impl Fn(i32) -> Option<T>,
) -> Result<Option<T>, Status> {
    match code {
        0 => Ok(None),
        code => from_code(code)
            .map(Some)
            .ok_or_else(|| refused(Refusal::invalid(field, "is not a known value"))),
    }
}

impl Api {
    pub(super) async fn get_account(
        &self,
        caller: &Caller,
        message: wire::GetAccountRequest,
    ) -> Answer<wire::GetAccountResponse> {
        rpc::context::record_read_context(message.context);
        check_id("account_id", &message.account_id)?;
        let account = self
            .store
            .account(&message.account_id)
            .await
            .map_err(failed)?;
        let account = account
            .filter(|account| caller.require_user(&account.user_id).is_ok())
            .ok_or_else(|| refused(Refusal::AccountNotFound))?;
        Ok(Response::new(wire::GetAccountResponse {
            account: Some(convert::to_account(&account)),
        }))
    }

    pub(super) async fn list_accounts(
        &self,
        caller: &Caller,
        message: wire::ListAccountsRequest,
    ) -> Answer<wire::ListAccountsResponse> {
        rpc::context::record_read_context(message.context);
        let user_id = effective_user_id(caller, message.user_id)?;
        let page = page::parse(message.pagination, page::filter_hash(&[&user_id]))?;
        let mut rows = self
            .store
            .accounts(&user_id, page_bound(&page))
            .await
            .map_err(failed)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.account_id.to_string(),
        });
        Ok(Response::new(wire::ListAccountsResponse {
            accounts: rows.iter().map(convert::to_account).collect(),
            pagination: Some(pagination),
        }))
    }

    pub(super) async fn subaccount(
        &self,
        caller: &Caller,
        subaccount_id: &str,
    ) -> Result<SubAccount, Status> {
        check_id("subaccount_id", subaccount_id)?;
        if let Some(name) = SubAccountName::parse(subaccount_id) {
            caller.require_user(name.user_id)?;
        }
        self.store
            .subaccount(subaccount_id)
            .await
            .map_err(failed)?
            .ok_or_else(|| refused(Refusal::SubAccountNotFound))
    }

    pub(super) async fn get_sub_account(
        &self,
        caller: &Caller,
        message: wire::GetSubAccountRequest,
    ) -> Answer<wire::GetSubAccountResponse> {
        rpc::context::record_read_context(message.context);
        let row = self.subaccount(caller, &message.subaccount_id).await?;
        Ok(Response::new(wire::GetSubAccountResponse {
            subaccount: Some(convert::to_subaccount(&row)),
        }))
    }

    pub(super) async fn list_sub_accounts(
        &self,
        caller: &Caller,
        message: wire::ListSubAccountsRequest,
    ) -> Answer<wire::ListSubAccountsResponse> {
        rpc::context::record_read_context(message.context);
        check_id_filter("instrument_id", &message.instrument_id)?;
        if message.subaccount_ids.len() > SUBACCOUNT_IDS_MAX {
            let text = format!("must be at most {SUBACCOUNT_IDS_MAX}");
            return Err(refused(Refusal::invalid("subaccount_ids", text)));
        }
        for id in &message.subaccount_ids {
            check_id("subaccount_ids", id)?;
        }
        let user_id = effective_user_id(caller, message.user_id)?;
        let mut filters = vec![user_id.as_str(), &message.instrument_id];
        filters.extend(message.subaccount_ids.iter().map(String::as_str));
        let page = page::parse(message.pagination, page::filter_hash(&filters))?;
        let filter = SubAccountFilter {
            user_id: &user_id,
            instrument_id: &message.instrument_id,
            subaccount_ids: &message.subaccount_ids,
        };
        let found = self.store.subaccounts(&filter, page_bound(&page)).await;
        let mut rows = found.map_err(failed)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.terms.created_at_us,
            id: row.terms.subaccount_id.to_string(),
        });
        Ok(Response::new(wire::ListSubAccountsResponse {
            subaccounts: rows.iter().map(convert::to_subaccount).collect(),
            pagination: Some(pagination),
        }))
    }

    /// Reads an operation with its postings, if it belongs to the caller or posts to one of the
    /// caller's sub-accounts.
    async fn operation(
        &self,
        caller: &Caller,
        operation_id: &str,
    ) -> Result<(Operation, Vec<Posting>), Status> {
        let missing = || refused(Refusal::OperationNotFound);
        let operation = self
            .store
            .operation(operation_id)
            .await
            .map_err(failed)?
            .ok_or_else(missing)?;
        let postings = self.store.postings(operation_id).await.map_err(failed)?;
        let concerns = |subaccount_id: &str| {
            SubAccountName::parse(subaccount_id)
                .is_some_and(|name| caller.require_user(name.user_id).is_ok())
        };
        let may_see = caller.require_user(&operation.terms.user_id).is_ok()
            || postings.iter().any(|posting| {
                concerns(&posting.debit_subaccount_id) || concerns(&posting.credit_subaccount_id)
            });
        may_see.then_some((operation, postings)).ok_or_else(missing)
    }

    pub(super) async fn get_operation(
        &self,
        caller: &Caller,
        message: wire::GetOperationRequest,
    ) -> Answer<wire::GetOperationResponse> {
        rpc::context::record_read_context(message.context);
        check_id("operation_id", &message.operation_id)?;
        let (operation, postings) = self.operation(caller, &message.operation_id).await?;
        Ok(Response::new(wire::GetOperationResponse {
            operation: Some(convert::to_operation(&operation)),
            postings: postings.iter().map(convert::to_posting).collect(),
        }))
    }

    pub(super) async fn list_operations(
        &self,
        caller: &Caller,
        message: wire::ListOperationsRequest,
    ) -> Answer<wire::ListOperationsResponse> {
        rpc::context::record_read_context(message.context);
        check_id_filter("idempotency_key", &message.idempotency_key)?;
        let user_id = effective_user_id(caller, message.user_id)?;
        let hash = page::filter_hash(&[
            &user_id,
            &message.r#type.to_string(),
            &message.status.to_string(),
            &message.idempotency_key,
        ]);
        let page = page::parse(message.pagination, hash)?;
        let filter = OperationFilter {
            user_id: &user_id,
            kind: optional_enum(message.r#type, "type", OperationType::from_code)?,
            status: optional_enum(message.status, "status", OperationStatus::from_code)?,
            idempotency_key: &message.idempotency_key,
        };
        let mut rows = self
            .store
            .operations(&filter, page_bound(&page))
            .await
            .map_err(failed)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.terms.created_at_us,
            id: row.terms.operation_id.to_string(),
        });
        Ok(Response::new(wire::ListOperationsResponse {
            operations: rows.iter().map(convert::to_operation).collect(),
            pagination: Some(pagination),
        }))
    }

    pub(super) async fn get_hold(
        &self,
        caller: &Caller,
        message: wire::GetHoldRequest,
    ) -> Answer<wire::GetHoldResponse> {
        rpc::context::record_read_context(message.context);
        check_id("hold_id", &message.hold_id)?;
        let hold = self.store.hold(&message.hold_id).await.map_err(failed)?;
        let hold = hold
            .filter(|hold| caller.require_user(&hold.terms.user_id).is_ok())
            .ok_or_else(|| refused(Refusal::HoldNotFound))?;
        Ok(Response::new(wire::GetHoldResponse {
            hold: Some(convert::to_hold(&hold)),
        }))
    }

    pub(super) async fn list_holds(
        &self,
        caller: &Caller,
        message: wire::ListHoldsRequest,
    ) -> Answer<wire::ListHoldsResponse> {
        rpc::context::record_read_context(message.context);
        check_id_filter("subaccount_id", &message.subaccount_id)?;
        convert::check_text("owner", &message.owner).map_err(refused)?;
        check_id_filter("parent_hold_id", &message.parent_hold_id)?;
        let user_id = effective_user_id(caller, String::new())?;
        let hash = page::filter_hash(&[
            &message.subaccount_id,
            &message.status.to_string(),
            &message.owner,
            &message.parent_hold_id,
            &user_id,
        ]);
        let page = page::parse(message.pagination, hash)?;
        let filter = HoldFilter {
            subaccount_id: &message.subaccount_id,
            status: optional_enum(message.status, "status", HoldStatus::from_code)?,
            owner: &message.owner,
            parent_hold_id: &message.parent_hold_id,
            user_id: &user_id,
        };
        let mut rows = self
            .store
            .holds(&filter, page_bound(&page))
            .await
            .map_err(failed)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.terms.created_at_us,
            id: row.terms.hold_id.to_string(),
        });
        Ok(Response::new(wire::ListHoldsResponse {
            holds: rows.iter().map(convert::to_hold).collect(),
            pagination: Some(pagination),
        }))
    }

    pub(super) async fn get_source_position(
        &self,
        _: &Caller,
        message: wire::GetSourcePositionRequest,
    ) -> Answer<wire::GetSourcePositionResponse> {
        rpc::context::record_read_context(message.context);
        check_id("source", &message.source)?;
        let through_sequence = self
            .store
            .source_position(&message.source)
            .await
            .map_err(failed)?;
        Ok(Response::new(wire::GetSourcePositionResponse {
            source: message.source,
            through_sequence,
        }))
    }

    pub(super) async fn get_trial_balance(
        &self,
        _: &Caller,
        message: wire::GetTrialBalanceRequest,
    ) -> Answer<wire::GetTrialBalanceResponse> {
        rpc::context::record_read_context(message.context);
        check_id_filter("instrument_id", &message.instrument_id)?;
        let found = self
            .store
            .trial_balance(&message.instrument_id)
            .await
            .map_err(failed)?;
        let lines = found.iter().map(line).collect::<Result<_, _>>()?;
        Ok(Response::new(wire::GetTrialBalanceResponse { lines }))
    }
}

fn line(row: &TrialBalance) -> Result<wire::TrialBalanceLine, Status> {
    let decimal = |minor: i128| {
        Decimal::new(minor, row.decimals)
            .map(|value| Some(to_decimal(value)))
            .map_err(|error| {
                rpc::status::internal(&Error::Invariant(format!(
                    "sum of {}: {error}",
                    row.instrument_id
                )))
            })
    };
    Ok(wire::TrialBalanceLine {
        instrument_id: row.instrument_id.clone(),
        total: decimal(row.total)?,
        circulating: decimal(-row.reserve)?,
        holders: decimal(row.total - row.reserve)?,
        active_holds: decimal(row.active_holds)?,
        unsettled: decimal(row.unsettled)?,
    })
}
