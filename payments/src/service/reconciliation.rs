//! Reconciliation of the bank account with the CFA-RUB supply (specification 4.2.6, T28).
//!
//! The figures are those at the time of the call; the worker calls after the end of each business
//! day. A mint or a transfer may complete between the bank read and the chain read. A comparison
//! with an unexplained part is therefore repeated, up to `reconcile_readings` comparisons in total.
//! The part that remains is a difference.

use std::time::{Duration, Instant};

use futures::stream::{self, StreamExt, TryStreamExt};
use uuid::Uuid;

use super::{Fault, Gateway};
use rail::Rub;
use service_kit::clock;
use types::BusinessDay;

use crate::{
    api::publish as emit,
    intent::Intent,
    payout::Payout,
    reconcile::{
        Assessment, DepositPart, Explained, PayoutPart, TokenSide, deposit_part, payout_part,
    },
    repo::{intents, payouts, receipts, reports, reports::Report},
};

/// Maximum concurrent calls to the CFA service.
const PEER_CALLS: usize = 8;
/// Kind of the health finding.
const DIFFERENCE: &str = "bank-difference";

impl Gateway {
    /// Compares bank and supply, stores the report, and publishes an alert if they differ. A used
    /// key returns its report and `true`.
    pub async fn reconcile(
        &self,
        day: BusinessDay,
        idempotency_key: Option<&str>,
        correlation_id: &str,
    ) -> Result<(Report, bool), Fault> {
        let _one_at_a_time = self.reconciling.lock().await;
        if let Some(key) = idempotency_key
            && let Some(stored) = reports::by_key(self.db.read(), key).await?
        {
            if stored.day != day {
                rpc::context::note_difference("Reconcile", key);
            }
            return Ok((stored, true));
        }
        let report = self
            .assess_and_store(&[], day, idempotency_key, correlation_id)
            .await?;
        Ok((report, false))
    }

    /// Reconciles past days, oldest first, with one assessment. Each day gets a report with its
    /// amounts. A difference raises one alert, with the report of the newest day.
    pub async fn reconcile_past_days(
        &self,
        days: &[BusinessDay],
        correlation_id: &str,
    ) -> Result<(), Fault> {
        let Some((newest, older)) = days.split_last() else {
            return Ok(());
        };
        let _one_at_a_time = self.reconciling.lock().await;
        self.assess_and_store(older, *newest, None, correlation_id)
            .await?;
        Ok(())
    }

    /// Assesses once and stores a report for each day in one transaction. Only the newest day has
    /// the key and the alert; returns its report. The caller holds `reconciling`.
    async fn assess_and_store(
        &self,
        older: &[BusinessDay],
        newest: BusinessDay,
        idempotency_key: Option<&str>,
        correlation_id: &str,
    ) -> Result<Report, Fault> {
        let began = Instant::now();
        let assessment = self.assess(correlation_id).await?;
        let created_at_us = clock::now_us();
        // The ids of one process are ordered, so the newest day is the latest report.
        let report_of = |day: BusinessDay| Report {
            report_id: Uuid::now_v7().to_string(),
            day,
            assessment,
            created_at_us,
        };
        let mut tx = self.db.write().await?;
        for day in older {
            reports::insert_in_tx(&mut tx, &report_of(*day), None).await?;
        }
        let report = report_of(newest);
        reports::insert_in_tx(&mut tx, &report, idempotency_key).await?;
        if !assessment.balanced() {
            let alert = emit::reconciliation_alert(&report, correlation_id);
            events::outbox::append_in_tx(&mut tx, &[alert]).await?;
        }
        tx.commit().await?;
        self.reported.notify_one();
        metrics::histogram!("reconciliation_duration_seconds")
            .record(began.elapsed().as_secs_f64());
        log_result(&report, older.len() + 1);
        Ok(report)
    }

    /// Compares until nothing is unexplained, at most `reconcile_readings` times.
    async fn assess(&self, correlation_id: &str) -> Result<Assessment, Fault> {
        let mut comparisons = 1;
        loop {
            let assessment = self.read_both_sides(correlation_id).await?;
            let enough = comparisons >= self.config.reconcile_readings.max(1);
            if assessment.unexplained == Rub::ZERO || enough {
                return Ok(assessment);
            }
            comparisons += 1;
            tokio::time::sleep(Duration::from_millis(self.config.reconcile_pause_ms)).await;
        }
    }

    /// Shows an unexplained difference of the latest report in health and metrics, or that there is
    /// none.
    ///
    /// # Errors
    /// The store cannot be read: health and metrics show what they showed before.
    pub async fn show_difference(&self) -> sqlx::Result<()> {
        let since_us = reports::unexplained_since_us(self.db.read()).await?;
        let latest = match since_us {
            Some(_) => reports::latest(self.db.read()).await?,
            None => None,
        };
        let is_open = f64::from(u8::from(since_us.is_some()));
        metrics::gauge!("payments_bank_difference_open").set(is_open);
        let age_us = since_us.map_or(0, |since_us| clock::now_us() - since_us);
        metrics::gauge!("payments_bank_difference_age_seconds").set(age_us.max(0) as f64 / 1e6);
        let reason = latest.map(|report| {
            let (unexplained, id) = (report.assessment.unexplained, report.report_id);
            format!("{unexplained} of the bank balance is unexplained in report {id}")
        });
        self.health.set_finding(DIFFERENCE, reason.as_deref());
        Ok(())
    }

    pub async fn latest_report(&self) -> Result<Report, Fault> {
        let latest = reports::latest(self.db.read()).await?;
        latest.ok_or(Fault::ReportNotFound)
    }

    async fn read_both_sides(&self, correlation_id: &str) -> Result<Assessment, Fault> {
        self.poll_pending().await?;
        self.poll_ordered().await?;
        let bank_balance = self.record_bank_health(self.bank.balance().await)?;
        let (token_supply, supply_block) = self.tokens.rub_supply(correlation_id).await?;
        let explained = self.explain(supply_block, correlation_id).await?;
        Ok(Assessment::new(bank_balance, token_supply, explained)?)
    }

    async fn explain(&self, supply_block: u64, correlation_id: &str) -> Result<Explained, Fault> {
        let mut explained = Explained {
            suspense: receipts::unmatched_total(self.db.read()).await?,
            ..Explained::default()
        };
        let mut settled_intents = Vec::new();
        for (intent, token) in self.issues(correlation_id).await? {
            let sum = match deposit_part(token, supply_block) {
                DepositPart::InFlight => &mut explained.in_flight_deposits,
                DepositPart::Suspense => &mut explained.suspense,
                DepositPart::Settled => {
                    settled_intents.push(intent.payment_id);
                    continue;
                }
            };
            *sum = sum.plus(intent.amount)?;
        }
        let mut settled_payouts = Vec::new();
        for (payout, token) in self.redemptions(correlation_id).await? {
            // A refund burns nothing: until it is paid, its deposit or receipt is in suspense.
            if payout.is_refund() {
                if !payout.is_open() {
                    settled_payouts.push(payout.payout_id);
                }
                continue;
            }
            match payout_part(&payout, token, supply_block) {
                PayoutPart::InFlight => {
                    explained.in_flight_payouts =
                        explained.in_flight_payouts.plus(payout.amount)?;
                }
                PayoutPart::NotBurned => {}
                PayoutPart::Settled => settled_payouts.push(payout.payout_id),
            }
        }
        if !settled_intents.is_empty() || !settled_payouts.is_empty() {
            let mut tx = self.db.write().await?;
            for payment_id in &settled_intents {
                intents::mark_settled_in_tx(&mut tx, payment_id).await?;
            }
            for payout_id in &settled_payouts {
                payouts::mark_settled_in_tx(&mut tx, payout_id).await?;
            }
            tx.commit().await?;
        }
        Ok(explained)
    }

    /// Unsettled deposits with their issues: one call each, because the CFA service has no call for
    /// several references.
    async fn issues(&self, correlation_id: &str) -> Result<Vec<(Intent, TokenSide)>, Fault> {
        let unsettled = stream::iter(intents::unsettled(self.db.read()).await?);
        let asked = unsettled.map(|intent| async move {
            let token = self
                .tokens
                .issue(&intent.payment_id, correlation_id)
                .await?;
            Ok::<_, Fault>((intent, token))
        });
        asked.buffered(PEER_CALLS).try_collect().await
    }

    /// Unsettled payouts with their redemptions; a refund has none.
    async fn redemptions(&self, correlation_id: &str) -> Result<Vec<(Payout, TokenSide)>, Fault> {
        let unsettled = stream::iter(payouts::unsettled(self.db.read()).await?);
        let asked = unsettled.map(|payout| async move {
            let token = match payout.is_refund() {
                true => TokenSide::MISSING,
                false => {
                    let asked = self.tokens.redemption(&payout.payout_id, correlation_id);
                    asked.await?
                }
            };
            Ok::<_, Fault>((payout, token))
        });
        asked.buffered(PEER_CALLS).try_collect().await
    }
}

/// Counts and logs one assessment, reported for `days` days.
fn log_result(report: &Report, days: usize) {
    let assessment = &report.assessment;
    let result = match (assessment.balanced(), assessment.unexplained == Rub::ZERO) {
        (true, true) => "balanced",
        (false, true) => "explained",
        (_, false) => "unexplained",
    };
    metrics::counter!("reconciliations_total", "result" => result).increment(1);
    let report_id = report.report_id.as_str();
    if assessment.balanced() {
        tracing::info!(report_id, days, "{assessment}");
    } else {
        tracing::error!(report_id, days, severity = "critical", "{assessment}");
    }
}
