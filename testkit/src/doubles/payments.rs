//! Payments double: intents and payouts whose state the test sets, and faults that it injects.

use std::time::Duration;

use proto::common::v1::{PaymentStatus, RequestContext};
use proto::payments::v1::payments_service_server::PaymentsService;
use proto::payments::v1::*;
use tonic::{Code, Request, Response, Status};

use super::{ServiceDoubles, number, unimplemented_methods};
use crate::messages::rubles;

#[derive(Clone, Copy)]
pub enum Fault {
    Late(Duration),
    Code(Code),
}

impl ServiceDoubles {
    /// Adds a deposit that the bank has reported as paid.
    pub fn paid(&self, payment_id: &str, user_id: &str, amount: &str) {
        let intent = PaymentIntent {
            payment_id: payment_id.to_owned(),
            user_id: user_id.to_owned(),
            amount: rubles(amount),
            status: PaymentStatus::Success.into(),
            ..Default::default()
        };
        self.with(|state| state.intents.insert(payment_id.to_owned(), intent));
    }

    /// Sets the bank's status of a payout.
    pub fn payout_becomes(&self, payout_id: &str, status: PaymentStatus) {
        self.with(|state| {
            let payout = state.payouts.get_mut(payout_id);
            payout.expect("payout is there").status = status.into();
        });
    }

    /// Records a call, then fails or delays it if the test has set a fault.
    async fn attempt(&self, context: Option<RequestContext>) -> Result<(), Status> {
        let (fault, is_unavailable) = self.with(|state| {
            state.payments_contexts.extend(context);
            (state.faults.pop_front(), state.payments_unavailable)
        });
        match fault {
            Some(Fault::Code(code)) => return Err(Status::new(code, "no")),
            Some(Fault::Late(by)) => tokio::time::sleep(by).await,
            None if is_unavailable => {
                return Err(rpc::status::unavailable("Payments service", 100));
            }
            None => {}
        }
        Ok(())
    }

    fn payout(
        &self,
        what: &str,
        payout_id: &str,
        act: impl FnOnce(&mut Payout),
    ) -> Result<Option<Payout>, Status> {
        self.with(|state| {
            state.trail.push(format!("{what} {payout_id}"));
            let payout = state.payouts.get_mut(payout_id);
            let payout = payout
                .ok_or_else(|| rpc::status::not_found("PAYOUT_NOT_FOUND", "Payout not found"))?;
            act(payout);
            Ok(Some(payout.clone()))
        })
    }
}

#[tonic::async_trait]
impl PaymentsService for ServiceDoubles {
    async fn initiate_payout(
        &self,
        request: Request<InitiatePayoutRequest>,
    ) -> Result<Response<InitiatePayoutResponse>, Status> {
        let request = request.into_inner();
        self.attempt(request.context).await?;
        let asked = request.payout.expect("a payout");
        let (id, account) = (asked.payout_id.clone(), asked.bank_account.clone());
        self.with(|state| {
            let amount = number(&asked.amount);
            state.trail.push(format!(
                "initiate {id} {} {amount} {account}",
                asked.user_id
            ));
            let payout = state.payouts.entry(id).or_insert(Payout {
                payout_id: asked.payout_id,
                user_id: asked.user_id,
                amount: asked.amount,
                bank_account: asked.bank_account,
                status: PaymentStatus::Pending.into(),
                ..Default::default()
            });
            let payout = Some(payout.clone());
            Ok(Response::new(InitiatePayoutResponse { payout }))
        })
    }

    async fn release_payout(
        &self,
        request: Request<ReleasePayoutRequest>,
    ) -> Result<Response<ReleasePayoutResponse>, Status> {
        let request = request.into_inner();
        self.attempt(request.context).await?;
        if self.with(|state| state.release_refused) {
            let text = "No tokens of this user and amount were burned for this payout";
            return Err(rpc::status::failed_precondition("NOT_BURNED", text));
        }
        let payout = self.payout("release", &request.payout_id, |payout| payout.sent = true)?;
        Ok(Response::new(ReleasePayoutResponse { payout }))
    }

    async fn cancel_payout(
        &self,
        request: Request<CancelPayoutRequest>,
    ) -> Result<Response<CancelPayoutResponse>, Status> {
        let request = request.into_inner();
        self.attempt(request.context).await?;
        let id = &request.payout_id;
        let is_open = |payout: &Payout| payout.status() == PaymentStatus::Pending;
        let at_bank = |payout: &Payout| payout.sent && is_open(payout);
        if self.with(|state| state.payouts.get(id).is_some_and(at_bank)) {
            let text = "Payout is at the bank already";
            return Err(rpc::status::failed_precondition("PAYOUT_SENT", text));
        }
        let payout = self.payout("cancel", id, |payout| {
            if is_open(payout) {
                payout.status = PaymentStatus::Failed.into();
                payout.failure_code = request.failure_code;
            }
        })?;
        Ok(Response::new(CancelPayoutResponse { payout }))
    }

    async fn get_payout(
        &self,
        request: Request<GetPayoutRequest>,
    ) -> Result<Response<GetPayoutResponse>, Status> {
        let request = request.into_inner();
        self.attempt(request.context).await?;
        let payout = self.payout("ask", &request.payout_id, |_| {})?;
        Ok(Response::new(GetPayoutResponse { payout }))
    }

    async fn get_payment_intent(
        &self,
        request: Request<GetPaymentIntentRequest>,
    ) -> Result<Response<GetPaymentIntentResponse>, Status> {
        let request = request.into_inner();
        self.attempt(request.context).await?;
        let intent = self.with(|state| state.intents.get(&request.payment_id).cloned());
        match intent {
            Some(_) => Ok(Response::new(GetPaymentIntentResponse { intent })),
            None => Err(rpc::status::not_found(
                "PAYMENT_NOT_FOUND",
                "Payment not found",
            )),
        }
    }

    async fn list_audit_records(
        &self,
        request: Request<ListAuditRecordsRequest>,
    ) -> Result<Response<ListAuditRecordsResponse>, Status> {
        self.attempt(request.into_inner().context).await?;
        Ok(Response::new(ListAuditRecordsResponse {
            records: self.with(|state| state.payments_records.clone()),
            pagination: None,
        }))
    }

    unimplemented_methods!(
        create_payment_intent: CreatePaymentIntentRequest => CreatePaymentIntentResponse,
        list_payment_intents: ListPaymentIntentsRequest => ListPaymentIntentsResponse,
        handle_payment_webhook: HandlePaymentWebhookRequest => HandlePaymentWebhookResponse,
        list_payouts: ListPayoutsRequest => ListPayoutsResponse,
        list_receipts: ListReceiptsRequest => ListReceiptsResponse,
        assign_receipt: AssignReceiptRequest => AssignReceiptResponse,
        refund_receipt: RefundReceiptRequest => RefundReceiptResponse,
        reconcile: ReconcileRequest => ReconcileResponse,
        get_latest_report: GetLatestReportRequest => GetLatestReportResponse,
    );
}
