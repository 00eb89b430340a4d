//! Client of the payments gateway: payment intents, payouts, reconciliation.

use async_recursion::async_recursion as boxed;
use proto::common::v1 as common;
use proto::convert::{money_minor, to_money};
use proto::payments::v1 as pb;
use proto::payments::v1::payments_service_client::PaymentsServiceClient;
use rpc::Context;
use types::{Decimal, Minor};
use uuid::Uuid;

use crate::convert::number_or_zero;
use crate::policy::{call, client, not_found_as_none};
use crate::{Answer, PaymentStatus};

/// A reconciliation with the bank, in roubles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconciliation {
    pub bank_balance: Decimal,
    pub token_supply: Decimal,
    pub in_flight_deposits: Decimal,
    pub in_flight_payouts: Decimal,
    pub suspense: Decimal,
    pub unexplained_difference: Decimal,
    pub notes: String,
}

client! {
    /// Client of the payments gateway.
    PaymentsClient, PaymentsServiceClient, "Payments service"
}

impl PaymentsClient {
    /// Status of the deposit with this id, user and amount; `None` if payments has no such deposit.
    #[boxed]
    pub async fn deposit(
        &self,
        context: &Context,
        payment_id: &str,
        user_id: &str,
        amount: Minor,
    ) -> Answer<Option<PaymentStatus>> {
        let request = pb::GetPaymentIntentRequest {
            context: self.peer.context(context),
            payment_id: payment_id.to_owned(),
        };
        let answer = not_found_as_none(self.peer.call(request, call!(get_payment_intent)).await)?;
        let intent = answer.and_then(|answer| answer.intent);
        let intent = intent.filter(|intent| {
            intent.payment_id == payment_id
                && intent.user_id == user_id
                && money_minor(intent.amount.as_ref()) == Ok(amount.0)
        });
        Ok(intent.and_then(|intent| PaymentStatus::from_code(intent.status)))
    }

    /// Records a payout, once per id. Returns false if the id has a payout of another user or
    /// amount. The bank account is not compared: it may have changed since the first call.
    #[boxed]
    pub async fn initiate_payout(
        &self,
        context: &Context,
        payout_id: &str,
        user_id: &str,
        amount: Minor,
        bank_account: &str,
    ) -> Answer<bool> {
        let request = pb::InitiatePayoutRequest {
            context: self.peer.keyed(context, &format!("{payout_id}:initiate")),
            payout: Some(pb::PayoutRequest {
                payout_id: payout_id.to_owned(),
                user_id: user_id.to_owned(),
                amount: Some(to_money(amount.0)),
                bank_account: bank_account.to_owned(),
            }),
        };
        let answer = self.peer.call(request, call!(initiate_payout)).await?;
        Ok(answer.payout.is_some_and(|stored| {
            stored.user_id == user_id && money_minor(stored.amount.as_ref()) == Ok(amount.0)
        }))
    }

    /// Releases a payout to the bank.
    #[boxed]
    pub async fn release_payout(&self, context: &Context, payout_id: &str) -> Answer<()> {
        let request = pb::ReleasePayoutRequest {
            context: self.peer.keyed(context, &format!("{payout_id}:release")),
            payout_id: payout_id.to_owned(),
        };
        self.peer.send(request, call!(release_payout)).await
    }

    /// Cancels a payout that is not sent to the bank. Returns its status: FAILED after the cancel,
    /// PENDING if it is sent, `None` for an unknown id.
    #[boxed]
    pub async fn cancel_payout(
        &self,
        context: &Context,
        payout_id: &str,
        failure_code: &str,
    ) -> Answer<Option<PaymentStatus>> {
        let request = pb::CancelPayoutRequest {
            context: self.peer.keyed(context, &format!("{payout_id}:cancel")),
            payout_id: payout_id.to_owned(),
            failure_code: failure_code.to_owned(),
        };
        let answer = match self.peer.call(request, call!(cancel_payout)).await {
            Err(error) if error.reason().as_deref() == Some("PAYOUT_SENT") => {
                return Ok(Some(PaymentStatus::Pending));
            }
            answer => not_found_as_none(answer)?,
        };
        let payout = answer.and_then(|answer| answer.payout);
        Ok(payout.and_then(|payout| PaymentStatus::from_code(payout.status)))
    }

    /// Reconciles today's bank balance with the token supply. Each call is a new reconciliation.
    #[boxed]
    pub async fn reconcile(&self, context: &Context) -> Answer<Reconciliation> {
        // Under a fixed key the service would return the report of an earlier call.
        let key = format!("{}:{}", self.peer.source, Uuid::now_v7());
        let request = pb::ReconcileRequest {
            context: self.peer.keyed(context, &key),
            business_date: None,
        };
        let answer = self.peer.call(request, call!(reconcile)).await?;
        let report = answer.report;
        let report = report.ok_or_else(|| self.peer.malformed_response("report is missing"))?;
        let rubles = |money: Option<common::Money>| {
            let amount = money.and_then(|money| money.amount);
            number_or_zero(amount.as_ref()).map_err(|what| self.peer.malformed_response(what))
        };
        Ok(Reconciliation {
            bank_balance: rubles(report.bank_balance)?,
            token_supply: rubles(report.token_supply)?,
            in_flight_deposits: rubles(report.in_flight_deposits)?,
            in_flight_payouts: rubles(report.in_flight_payouts)?,
            suspense: rubles(report.suspense)?,
            unexplained_difference: rubles(report.unexplained_difference)?,
            notes: report.notes,
        })
    }

    /// Status of a payout; `None` for an unknown id.
    #[boxed]
    pub async fn payout(&self, context: &Context, id: &str) -> Answer<Option<PaymentStatus>> {
        let request = pb::GetPayoutRequest {
            context: self.peer.context(context),
            payout_id: id.to_owned(),
        };
        let answer = not_found_as_none(self.peer.call(request, call!(get_payout)).await)?;
        let payout = answer.and_then(|answer| answer.payout);
        Ok(payout.and_then(|payout| PaymentStatus::from_code(payout.status)))
    }
}
