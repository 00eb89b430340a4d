//! `SandboxBankService`: simulates payers, injects faults, reads the bank's state, and signs
//! documents for users.

use std::sync::Arc;

use proto::{
    convert::{money_minor, to_money, to_timestamp_us},
    sandbox::v1::{self as pb, sandbox_bank_service_server::SandboxBankService},
};
use rail::Rub;
use rpc::{
    context::Once,
    page::{self, Key},
    status::{failed_precondition, internal, invalid_argument, not_found},
};
use tonic::{Request, Response, Status};
use types::PaymentStatus;

use crate::api::{begin, commit};

use super::{
    Ca,
    ca::OPERATOR,
    operations::{Bank, Fault, Refusal, Transfer},
    repo,
};

/// The RPC shell.
pub struct Api {
    pub bank: Arc<Bank>,
    pub ca: Arc<Ca>,
}

#[tonic::async_trait]
impl SandboxBankService for Api {
    async fn pay(
        &self,
        request: Request<pb::PayRequest>,
    ) -> Result<Response<pb::PayResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let once = Once::of("Pay", &caller, &context, &ask);
        let amount = match &ask.amount {
            Some(amount) => Some(Rub::from_kopecks(
                money_minor(Some(amount))
                    .map_err(|error| invalid_argument("amount", error.to_string()))?,
            )),
            None => None,
        };
        let outcome = match PaymentStatus::from_code(ask.outcome) {
            None if ask.outcome == 0 => PaymentStatus::Success,
            Some(outcome) if outcome != PaymentStatus::Refunded => outcome,
            _ => {
                return Err(invalid_argument(
                    "outcome",
                    "must be PENDING, SUCCESS, FAILED or EXPIRED",
                ));
            }
        };
        let mut tx = begin!(&self.bank.db, &once);
        let text = ask.qr_payload.trim();
        let paid = self.bank.pay_in_tx(&mut tx, text, amount, outcome).await;
        let (transaction_id, status) = paid.map_err(to_status)?;
        let answer = pb::PayResponse {
            transaction_id,
            status: status.code(),
        };
        let answer = commit(tx, &once, answer).await?;
        self.bank.wake();
        Ok(answer)
    }

    async fn set_fault(
        &self,
        request: Request<pb::SetFaultRequest>,
    ) -> Result<Response<pb::SetFaultResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let once = Once::of("SetFault", &caller, &context, &ask);
        let fault = Fault::from_code(ask.fault);
        if fault.is_none() && ask.fault != pb::BankFault::None as i32 {
            return Err(invalid_argument("fault", "is required; NONE clears faults"));
        }
        let for_transfers = matches!(
            fault,
            None | Some(Fault::RefuseTransfer | Fault::HoldTransfer)
        );
        if !ask.account.is_empty() && !for_transfers {
            return Err(invalid_argument("account", "applies to transfers only"));
        }
        let mut tx = begin!(&self.bank.db, &once);
        let set = self.bank.set_fault_in_tx(&mut tx, &ask.account, fault);
        set.await.map_err(to_status)?;
        let answer = commit(tx, &once, pb::SetFaultResponse { fault: ask.fault }).await?;
        self.bank.wake();
        Ok(answer)
    }

    async fn get_bank_balance(
        &self,
        request: Request<pb::GetBankBalanceRequest>,
    ) -> Result<Response<pb::GetBankBalanceResponse>, Status> {
        rpc::context::record_read_context(request.into_inner().context);
        let balance = repo::balance(self.bank.db.read(), &self.bank.config.account_number).await;
        let balance = balance.map_err(|error| internal(&error))?;
        Ok(Response::new(pb::GetBankBalanceResponse {
            balance: Some(to_money(balance.kopecks())),
        }))
    }

    async fn list_transfers(
        &self,
        request: Request<pb::ListTransfersRequest>,
    ) -> Result<Response<pb::ListTransfersResponse>, Status> {
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let page = page::parse(ask.pagination, page::filter_hash(&[]))?;
        let (created_at_us, id) = page.bound();
        let rows = repo::list_transfers(self.bank.db.read(), created_at_us, id, page.rows_limit());
        let mut rows = rows.await.map_err(|error| internal(&error))?;
        let pagination = page.finish(&mut rows, |transfer| Key {
            created_us: transfer.created_at_us,
            id: transfer.transfer_id.clone(),
        });
        Ok(Response::new(pb::ListTransfersResponse {
            transfers: rows.iter().map(to_transfer).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn sign_document(
        &self,
        request: Request<pb::SignDocumentRequest>,
    ) -> Result<Response<pb::SignDocumentResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        if ask.user_id.is_empty() {
            return Err(invalid_argument("user_id", "must not be empty"));
        }
        if ask.user_id == OPERATOR {
            let problem = "must be a user's: only the platform signs with this name";
            return Err(invalid_argument("user_id", problem));
        }
        caller.require_user(&ask.user_id)?;
        let mut document = [0; 32];
        hex::decode_to_slice(&ask.document_hash, &mut document)
            .map_err(|_| invalid_argument("document_hash", "must be 64 hex digits"))?;
        let signed = self.ca.sign(&ask.user_id, &document);
        let signature = signed.map_err(|error| internal(&error))?;
        Ok(Response::new(pb::SignDocumentResponse {
            signature: signature.into(),
            document_hash: ask.document_hash,
        }))
    }
}

fn to_transfer(transfer: &Transfer) -> pb::BankTransfer {
    pb::BankTransfer {
        transfer_id: transfer.transfer_id.clone(),
        recipient_account: transfer.recipient_account.clone(),
        amount: Some(to_money(transfer.amount.kopecks())),
        status: transfer.status.code(),
        purpose: transfer.purpose.clone(),
        created_at: Some(to_timestamp_us(transfer.created_at_us)),
    }
}

fn to_status(refusal: Refusal) -> Status {
    match refusal {
        Refusal::BadRequest(body) if body.code == "INVALID_CODE" => {
            invalid_argument("qr_payload", body.message)
        }
        Refusal::BadRequest(body) => failed_precondition(&body.code, body.message),
        Refusal::NotFound => not_found("PAYMENT_CODE_NOT_FOUND", "Payment code not found"),
        Refusal::Store(error) => internal(&error),
        Refusal::Sql(error) => internal(&error),
    }
}
