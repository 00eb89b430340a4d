//! `PaymentsService` (specification 4.2): decodes requests, calls use cases, encodes responses.

use std::sync::Arc;

use events::audit::{self, RecordFilter, RecordRow};
use proto::payments::v1::{self as pb, payments_service_server::PaymentsService};
use rpc::{
    context::{Once, answered},
    page::{self, Key},
    status::invalid_argument,
};
use tonic::{Request, Response, Status, metadata::MetadataMap};

use super::convert;
use rail::webhook::{BODY_BYTES_MAX, ID_HEADER, SIGNATURE_HEADER, Signed, TIMESTAMP_HEADER};
use service_kit::clock;
use types::BusinessDay;

use crate::{
    repo::{Filter, PageBound, intents, payouts, receipts},
    service::{
        Acting, Claim, Fault, Gateway, NewIntent, NewPayout, NewRefund, Owner, WebhookSubject,
    },
};

/// The caller of a write that acts once per key, from its request, whose context is taken.
macro_rules! acting {
    ($call:literal, $caller:expr, $ask:expr) => {{
        let context = rpc::context::write($ask.context.take())?;
        let once = Once::of($call, &$caller, &context, &$ask);
        Acting {
            caller: $caller,
            context,
            once,
        }
    }};
}

/// The RPC shell.
pub struct Api(pub Arc<Gateway>);

#[tonic::async_trait]
impl PaymentsService for Api {
    async fn create_payment_intent(
        &self,
        request: Request<pb::CreatePaymentIntentRequest>,
    ) -> Result<Response<pb::CreatePaymentIntentResponse>, Status> {
        rpc::caller(&request)?.require_user(&request.get_ref().user_id)?;
        let ask = request.into_inner();
        let context = rpc::context::write(ask.context)?;
        let (intent, replayed) = self
            .0
            .create_intent(NewIntent {
                user_id: text("user_id", ask.user_id)?,
                amount: convert::rub("amount", ask.amount.as_ref())?,
                method: convert::method(ask.method)?,
                context,
            })
            .await?;
        let answer = pb::CreatePaymentIntentResponse {
            intent: Some(convert::intent(&intent)),
        };
        Ok(answered(answer, replayed))
    }

    async fn get_payment_intent(
        &self,
        request: Request<pb::GetPaymentIntentRequest>,
    ) -> Result<Response<pb::GetPaymentIntentResponse>, Status> {
        rpc::context::record_read_context(request.get_ref().context.clone());
        let found = intents::get(self.0.db.read(), &request.get_ref().payment_id)
            .await
            .map_err(Fault::from)?
            .ok_or(Fault::IntentNotFound)?;
        rpc::caller(&request)?.require_user(&found.user_id)?;
        Ok(Response::new(pb::GetPaymentIntentResponse {
            intent: Some(convert::intent(&found)),
        }))
    }

    async fn list_payment_intents(
        &self,
        request: Request<pb::ListPaymentIntentsRequest>,
    ) -> Result<Response<pb::ListPaymentIntentsResponse>, Status> {
        rpc::caller(&request)?.require_user(&request.get_ref().user_id)?;
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let status = status_filter(ask.status)?;
        let filter_hash = page::filter_hash(&[&ask.user_id, status]);
        let page = page::parse(ask.pagination, filter_hash)?;
        let filter = Filter {
            user_id: &ask.user_id,
            status,
        };
        let mut rows = intents::list(self.0.db.read(), filter, page_bound(&page))
            .await
            .map_err(Fault::from)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.payment_id.clone(),
        });
        Ok(Response::new(pb::ListPaymentIntentsResponse {
            intents: rows.iter().map(convert::intent).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn handle_payment_webhook(
        &self,
        request: Request<pb::HandlePaymentWebhookRequest>,
    ) -> Result<Response<pb::HandlePaymentWebhookResponse>, Status> {
        let (metadata, _, ask) = request.into_parts();
        rpc::context::record_read_context(ask.context);
        let webhook = ask.webhook.unwrap_or_default();
        if webhook.provider_payload.len() > BODY_BYTES_MAX {
            let problem = format!("is longer than {BODY_BYTES_MAX} bytes");
            return Err(invalid_argument("webhook.provider_payload", problem));
        }
        let signed = Signed {
            id: header(&metadata, ID_HEADER),
            timestamp: header(&metadata, TIMESTAMP_HEADER),
            signatures: header(&metadata, SIGNATURE_HEADER),
        };
        // The unsigned fields are compared with the signed body once its signature is verified.
        let status = convert::status("webhook.status", webhook.status).unwrap_or_default();
        let claim = Claim {
            payment_id: webhook.payment_id,
            status,
            amount: convert::claimed_rub(webhook.amount.as_ref()),
        };
        let body = webhook.provider_payload.as_bytes();
        match self.0.handle_webhook(signed, body, Some(claim)).await? {
            WebhookSubject::Payment(intent) => {
                Ok(Response::new(pb::HandlePaymentWebhookResponse {
                    intent: Some(convert::intent(&intent)),
                }))
            }
            WebhookSubject::Payout => Err(invalid_argument(
                "webhook.provider_payload",
                "is about a transfer, not about a payment",
            )),
        }
    }

    async fn initiate_payout(
        &self,
        request: Request<pb::InitiatePayoutRequest>,
    ) -> Result<Response<pb::InitiatePayoutResponse>, Status> {
        let ask = request.into_inner();
        let context = rpc::context::write(ask.context)?;
        let payout = ask
            .payout
            .ok_or_else(|| invalid_argument("payout", "is required"))?;
        let bank_account = payout.bank_account.trim().to_owned();
        let (payout, replayed) = self
            .0
            .initiate_payout(NewPayout {
                payout_id: text("payout.payout_id", payout.payout_id)?,
                user_id: text("payout.user_id", payout.user_id)?,
                amount: convert::rub("payout.amount", payout.amount.as_ref())?,
                bank_account,
                context,
            })
            .await?;
        let answer = pb::InitiatePayoutResponse {
            payout: Some(convert::payout(&payout)),
        };
        Ok(answered(answer, replayed))
    }

    async fn release_payout(
        &self,
        request: Request<pb::ReleasePayoutRequest>,
    ) -> Result<Response<pb::ReleasePayoutResponse>, Status> {
        let ask = request.into_inner();
        let context = rpc::context::write(ask.context)?;
        let (payout, replayed) = self
            .0
            .release_payout(&ask.payout_id, &context.correlation_id)
            .await?;
        let answer = pb::ReleasePayoutResponse {
            payout: Some(convert::payout(&payout)),
        };
        Ok(answered(answer, replayed))
    }

    async fn cancel_payout(
        &self,
        request: Request<pb::CancelPayoutRequest>,
    ) -> Result<Response<pb::CancelPayoutResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let acting = acting!("CancelPayout", caller, ask);
        let code = text("failure_code", ask.failure_code)?;
        let cancelled = self.0.cancel_payout(&acting, &ask.payout_id, &code);
        let (payout, replayed) = cancelled.await?;
        let answer = pb::CancelPayoutResponse {
            payout: Some(convert::payout(&payout)),
        };
        Ok(answered(answer, replayed))
    }

    async fn get_payout(
        &self,
        request: Request<pb::GetPayoutRequest>,
    ) -> Result<Response<pb::GetPayoutResponse>, Status> {
        rpc::context::record_read_context(request.get_ref().context.clone());
        let found = payouts::get(self.0.db.read(), &request.get_ref().payout_id)
            .await
            .map_err(Fault::from)?
            .ok_or(Fault::PayoutNotFound)?;
        let caller = rpc::caller(&request)?;
        caller.require_user(&found.user_id)?;
        Ok(Response::new(pb::GetPayoutResponse {
            payout: Some(convert::payout_for(caller, &found)),
        }))
    }

    async fn list_payouts(
        &self,
        request: Request<pb::ListPayoutsRequest>,
    ) -> Result<Response<pb::ListPayoutsResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let ask = request.into_inner();
        caller.require_user(&ask.user_id)?;
        rpc::context::record_read_context(ask.context);
        let status = status_filter(ask.status)?;
        let filter_hash = page::filter_hash(&[&ask.user_id, status]);
        let page = page::parse(ask.pagination, filter_hash)?;
        let filter = Filter {
            user_id: &ask.user_id,
            status,
        };
        let mut rows = payouts::list(self.0.db.read(), filter, page_bound(&page))
            .await
            .map_err(Fault::from)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.payout_id.clone(),
        });
        let shown = |row| convert::payout_for(&caller, row);
        Ok(Response::new(pb::ListPayoutsResponse {
            payouts: rows.iter().map(shown).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn list_receipts(
        &self,
        request: Request<pb::ListReceiptsRequest>,
    ) -> Result<Response<pb::ListReceiptsResponse>, Status> {
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let status = convert::receipt_status(ask.status)?.map_or("", |status| status.as_str());
        let page = page::parse(ask.pagination, page::filter_hash(&[status]))?;
        let mut rows = receipts::list(self.0.db.read(), status, page_bound(&page))
            .await
            .map_err(Fault::from)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.receipt_id.clone(),
        });
        Ok(Response::new(pb::ListReceiptsResponse {
            receipts: rows.iter().map(convert::receipt).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn assign_receipt(
        &self,
        request: Request<pb::AssignReceiptRequest>,
    ) -> Result<Response<pb::AssignReceiptResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let acting = acting!("AssignReceipt", caller, ask);
        let owner = match (ask.payment_id.is_empty(), ask.user_id.is_empty()) {
            (false, true) => Owner::Intent(ask.payment_id),
            (true, false) => Owner::User(ask.user_id),
            (true, true) => return Err(invalid_argument("user_id", "must not be empty")),
            (false, false) => {
                let problem = "must be empty beside payment_id";
                return Err(invalid_argument("user_id", problem));
            }
        };
        let reason = text("reason", ask.reason)?;
        let assigned = self
            .0
            .assign_receipt(&acting, &ask.receipt_id, &owner, &reason);
        let (receipt, intent, replayed) = assigned.await?;
        let answer = pb::AssignReceiptResponse {
            receipt: Some(convert::receipt(&receipt)),
            intent: Some(convert::intent(&intent)),
        };
        Ok(answered(answer, replayed))
    }

    async fn refund_receipt(
        &self,
        request: Request<pb::RefundReceiptRequest>,
    ) -> Result<Response<pb::RefundReceiptResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let acting = acting!("RefundReceipt", caller, ask);
        let refund = NewRefund {
            receipt_id: ask.receipt_id,
            bank_account: ask.bank_account,
            reason: text("reason", ask.reason)?,
        };
        let (receipt, payout, replayed) = self.0.refund_receipt(&acting, refund).await?;
        let answer = pb::RefundReceiptResponse {
            receipt: Some(convert::receipt(&receipt)),
            payout: Some(convert::payout(&payout)),
        };
        Ok(answered(answer, replayed))
    }

    async fn reconcile(
        &self,
        request: Request<pb::ReconcileRequest>,
    ) -> Result<Response<pb::ReconcileResponse>, Status> {
        let subject = rpc::caller(&request)?.subject.clone();
        let ask = request.into_inner();
        let context = rpc::context::write(ask.context)?;
        let today = BusinessDay::of(clock::now_us());
        let day = ask.business_date.map_or(today, |date| {
            BusinessDay::of(proto::convert::timestamp_us(&date))
        });
        if day > today {
            return Err(invalid_argument("business_date", "is in the future"));
        }
        // The scope of a key is its caller (T12).
        let key = format!("{subject}:{}", context.idempotency_key);
        let reconciled = self.0.reconcile(day, Some(&key), &context.correlation_id);
        let (report, replayed) = reconciled.await?;
        let answer = pb::ReconcileResponse {
            report: Some(convert::report(&report)),
        };
        Ok(answered(answer, replayed))
    }

    async fn get_latest_report(
        &self,
        request: Request<pb::GetLatestReportRequest>,
    ) -> Result<Response<pb::GetLatestReportResponse>, Status> {
        rpc::context::record_read_context(request.into_inner().context);
        let report = self.0.latest_report().await?;
        Ok(Response::new(pb::GetLatestReportResponse {
            report: Some(convert::report(&report)),
        }))
    }

    async fn list_audit_records(
        &self,
        request: Request<pb::ListAuditRecordsRequest>,
    ) -> Result<Response<pb::ListAuditRecordsResponse>, Status> {
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let filter_hash = page::filter_hash(&[&ask.actor, &ask.object_id]);
        let page = page::parse(ask.pagination, filter_hash)?;
        let (before, _) = page.bound();
        let filter = RecordFilter {
            actor: &ask.actor,
            object_id: &ask.object_id,
        };
        let rows = audit::list(self.0.db.read(), filter, before, page.rows_limit()).await;
        let mut rows = rows.map_err(Fault::from)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.sequence,
            id: String::new(),
        });
        let listed =
            |row: &RecordRow| rpc::audit::listed(&row.record(), &row.previous_hash, &row.hash);
        Ok(Response::new(pb::ListAuditRecordsResponse {
            records: rows.iter().map(listed).collect(),
            pagination: Some(pagination),
        }))
    }
}

fn header<'a>(metadata: &'a MetadataMap, name: &str) -> &'a str {
    let value = metadata.get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or("")
}

/// A required text; [`proto::checks`] bounds it.
fn text(field: &'static str, text: String) -> Result<String, Status> {
    if text.trim().is_empty() {
        return Err(invalid_argument(field, "must not be empty"));
    }
    Ok(text)
}

fn status_filter(status: i32) -> Result<&'static str, Status> {
    Ok(convert::status("status", status)?.map_or("", |status| status.as_str()))
}

fn page_bound(page: &page::Page) -> PageBound<'_> {
    let (created_at_us, id) = page.bound();
    PageBound {
        created_at_us,
        id,
        limit: page.rows_limit(),
    }
}
