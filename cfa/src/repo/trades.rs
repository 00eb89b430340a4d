//! Operations of trades, a batch at a time: the number of statements does not depend on the number
//! of trades. Every statement costs a round trip to the connection's thread.

use std::collections::HashMap;

use events::{MultiRow, Script, Tx};
use serde_json::json;
use sqlx::{QueryBuilder, Sqlite};

use super::Repo;
use super::operations::{COLUMNS, NOT_REFUSED, REFUSED, decode};
use crate::error::Error;
use crate::model::{Batch, Flow, Operation, Status};
use crate::saga::{Chain, SagaProgress};

/// New operations of trades. The seller is user and giver; the trade's id is key and reference.
static TRADES: MultiRow = MultiRow::new(
    "INSERT INTO operation (operation_id, flow, kind, status, user_id, from_user_id, to_user_id, \
        amount, units_minor, currency_code, instrument_id, idempotency_key, external_ref, trade_id, \
        rejection, rejection_message, payment_minor, fee_minor, created_at_us, updated_at_us, \
        correlation_id, batch_id, bookbuilding_id, attempts, fact_gated, fact_chain, fact_payout, \
        fact_settled, fact_minted_back, fact_undone, fact_blocked) \
     SELECT column1, column2, column3, column4, column5, column5, column6, column7, column8, \
        column9, column9, column10, column10, column10, column11, column12, column13, column14, \
        column15, column16, column17, column18, '', 0, 0, 0, 0, 0, 0, 0, 0 FROM (VALUES ",
    18,
    ") LIMIT +?",
);

/// Stored operations that may be those of trades, by trade id.
#[derive(Default)]
pub struct StoredTrades(HashMap<String, Vec<Operation>>);

impl StoredTrades {
    /// The stored operation with the key of this one, or with its reference unless that one was
    /// refused.
    pub fn take(&mut self, wanted: &Operation) -> Option<Operation> {
        let stored = self.0.get_mut(&wanted.external_ref)?;
        let has_key = |stored: &Operation| {
            stored.flow == wanted.flow
                && stored.user_id == wanted.user_id
                && stored.idempotency_key == wanted.idempotency_key
        };
        let is_refused =
            |stored: &Operation| matches!(stored.status, Status::Rejected | Status::Refunded);
        let by_key = stored.iter().position(has_key);
        let found = by_key.or_else(|| stored.iter().position(|stored| !is_refused(stored)))?;
        Some(stored.swap_remove(found))
    }
}

impl Repo {
    /// The stored operations of these trades.
    pub async fn stored_trades_in_tx(
        &self,
        tx: &mut Tx,
        trade_ids: &[&str],
    ) -> Result<StoredTrades, Error> {
        let ids = json!(trade_ids).to_string();
        let kind = Flow::Trade.kind().code();
        let mut query = QueryBuilder::<Sqlite>::new("");
        for (union, rows) in [("", NOT_REFUSED), (" UNION ALL ", REFUSED)] {
            query.push(format!(
                "{union}SELECT {COLUMNS} FROM operation WHERE kind = {kind} AND external_ref IN \
                 (SELECT value FROM json_each("
            ));
            query.push_bind(ids.clone());
            query.push(format!(")) AND {rows}"));
        }
        let mut stored = StoredTrades::default();
        for row in query.build().fetch_all(&mut **tx).await? {
            let operation = decode(&row)?;
            let of_trade = stored.0.entry(operation.external_ref.clone());
            of_trade.or_default().push(operation);
        }
        Ok(stored)
    }

    /// True for the operation of a trade that is in no batch and has not ended.
    pub async fn is_without_batch_in_tx(
        &self,
        tx: &mut Tx,
        operation_id: &str,
    ) -> Result<bool, Error> {
        let found = sqlx::query_scalar(
            "SELECT EXISTS(SELECT 1 FROM operation \
             WHERE operation_id = $1 AND flow = 6 AND status = 1 AND batch_id IS NULL)",
        );
        Ok(found.bind(operation_id).fetch_one(&mut **tx).await?)
    }

    /// Inserts operations of trades of which none is stored.
    pub async fn insert_trades_in_tx(
        &self,
        tx: &mut Tx,
        operations: &[Operation],
        batch_id: Option<&str>,
    ) -> Result<(), Error> {
        let mut script = Script::default();
        script
            .add(tx, &TRADES, operations, |operation, values| {
                assert_new_trade(operation);
                let rejection = operation.rejection.as_ref();
                values.put(&operation.operation_id);
                values.put(operation.flow.code());
                values.put(operation.flow.kind().code());
                values.put(operation.status.code());
                values.put(&operation.user_id);
                values.put(&operation.to_user_id);
                values.put(operation.amount.to_string());
                values.put(operation.units_minor);
                values.put(&operation.instrument_id);
                values.put(&operation.trade_id);
                values.put(rejection.map(|(reason, _)| reason.code()));
                values.put(rejection.map(|(_, message)| message.clone()));
                values.put(operation.payment_minor);
                values.put(operation.fee_minor);
                values.put(operation.created_at_us);
                values.put(operation.updated_at_us);
                values.put(&operation.correlation_id);
                values.put(batch_id.map(str::to_owned));
            })
            .await?;
        script.run(tx).await?;
        Ok(())
    }

    /// Assigns stored operations to a batch instead of an earlier one, with what the batch changes.
    pub async fn assign_trades_in_tx(
        &self,
        tx: &mut Tx,
        operations: &[Operation],
        batch_id: &str,
    ) -> Result<(), Error> {
        if operations.is_empty() {
            return Ok(());
        }
        let rows = operations.iter().map(|operation| {
            operation.assert_consistent();
            assert_eq!(operation.progress, SagaProgress::default(), "begins anew");
            let rejection = operation.rejection.as_ref();
            json!([
                operation.operation_id,
                operation.status.code(),
                operation.attempts,
                operation.payment_minor,
                operation.fee_minor,
                rejection.map(|(reason, _)| reason.code()),
                rejection.map(|(_, message)| message),
                operation.updated_at_us,
            ])
        });
        let rows = serde_json::Value::Array(rows.collect()).to_string();
        let done = sqlx::query(
            "UPDATE operation SET batch_id = $2, status = json_extract(v.value, '$[1]'), \
                attempts = json_extract(v.value, '$[2]'), \
                payment_minor = json_extract(v.value, '$[3]'), \
                fee_minor = json_extract(v.value, '$[4]'), \
                rejection = json_extract(v.value, '$[5]'), \
                rejection_message = json_extract(v.value, '$[6]'), \
                updated_at_us = json_extract(v.value, '$[7]'), \
                fact_gated = 0, fact_chain = 0, fact_payout = 0, fact_settled = 0, \
                fact_minted_back = 0, fact_undone = 0, fact_blocked = 0, fact_limit = 0, \
                fact_refunding = 0 \
             FROM json_each($1) AS v WHERE operation_id = json_extract(v.value, '$[0]')",
        )
        .bind(rows)
        .bind(batch_id)
        .execute(&mut **tx)
        .await?;
        assert_count(done.rows_affected(), operations.len());
        Ok(())
    }

    /// Makes operations of a batch final, as `Operation::set_status` has done in memory.
    pub async fn finalize_trades_in_tx(
        &self,
        tx: &mut Tx,
        operations: &[&Operation],
        batch: &Batch,
        now_us: i64,
    ) -> Result<(), Error> {
        let ids: Vec<&str> = operations
            .iter()
            .map(|operation| {
                operation.assert_consistent();
                operation.operation_id.as_str()
            })
            .collect();
        let done = sqlx::query(
            "UPDATE operation SET status = $2, finalized_at_us = $3, updated_at_us = $3, \
                block_number = $4, fact_chain = $5, fact_settled = 1 \
             WHERE operation_id IN (SELECT value FROM json_each($1))",
        )
        .bind(json!(ids).to_string())
        .bind(Status::Finalized.code())
        .bind(now_us)
        .bind(batch.block_number.map(|number| number as i64))
        .bind(Chain::Succeeded.code())
        .execute(&mut **tx)
        .await?;
        assert_count(done.rows_affected(), operations.len());
        Ok(())
    }
}

fn assert_count(changed: u64, wanted: usize) {
    assert_eq!(
        changed, wanted as u64,
        "operations to save are not in the store"
    );
}

/// The insert derives columns from others and leaves those of a started operation at their
/// defaults.
fn assert_new_trade(operation: &Operation) {
    operation.assert_consistent();
    let trade_id = &operation.trade_id;
    assert!(
        operation.flow == Flow::Trade
            && operation.user_id == operation.from_user_id
            && operation.currency_code == operation.instrument_id
            && [&operation.idempotency_key, &operation.external_ref] == [trade_id; 2]
            && operation.bookbuilding_id.is_empty()
            && operation.hold_id.is_none()
            && operation.tx_hash.is_none()
            && operation.attempts == 0
            && operation.progress == SagaProgress::default(),
        "not a new trade: {operation:?}"
    );
}
