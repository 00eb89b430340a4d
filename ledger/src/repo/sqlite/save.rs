//! Writing what the fold made of a group: one statement per kind of row, every row of that kind in one bound value.

use serde_json::{Value, json};

use super::{Group, rows};
use crate::{
    Error,
    book::Book,
    fold::{Act, Command},
    repo::rows::outcome_text,
};

impl Group {
    /// Writes every changed row. The order follows the references between the tables.
    pub(super) async fn save_rows(&mut self, book: &Book) -> Result<(), Error> {
        self.put(
            "INSERT INTO instruments (instrument_id, decimals) SELECT value->>0, value->>1 FROM json_each($1)",
            book.scales.changes().iter().filter_map(|change| Some(json!([&**change.key, change.after?]))).collect(),
        )
        .await?;
        self.put(
            "INSERT INTO users (user_id, blocked) SELECT value->>0, value->>1 FROM json_each($1) WHERE true \
             ON CONFLICT (user_id) DO UPDATE SET blocked = excluded.blocked",
            book.users
                .changes()
                .iter()
                .filter_map(|change| Some(json!([&**change.key, i32::from(change.after?.blocked)]))).collect(),
        )
        .await?;
        self.put(
            "INSERT INTO accounts (account_id, user_id, kind, created_at_us, updated_at_us) \
             SELECT value->>0, value->>1, value->>2, value->>3, value->>4 FROM json_each($1)",
            book.accounts
                .changes()
                .iter()
                .filter_map(|change| change.after.map(rows::account))
                .collect(),
        )
        .await?;
        self.put(
            "INSERT INTO sub_accounts (subaccount_id, account_id, user_id, instrument_id, balance, held, unsettled, version, \
             freeze, closed, may_be_negative, created_at_us, updated_at_us) \
             SELECT value->>0, value->>1, value->>2, value->>3, value->>4, value->>5, value->>6, value->>7, value->>8, value->>9, \
             value->>10, value->>11, value->>12 FROM json_each($1) WHERE true \
             ON CONFLICT (subaccount_id) DO UPDATE SET balance = excluded.balance, held = excluded.held, \
             unsettled = excluded.unsettled, version = excluded.version, freeze = excluded.freeze, closed = excluded.closed, \
             updated_at_us = excluded.updated_at_us",
            book.subaccounts.changes().iter().filter_map(|change| change.after.map(rows::subaccount)).collect(),
        )
        .await?;
        self.put(
            "INSERT INTO holds (hold_id, subaccount_id, user_id, instrument_id, amount, remaining, added, split_off, consumed, \
             released, returned_by_children, status, expiry_told, reason, owner, parent_hold_id, destination_subaccount_id, \
             expires_at_us, created_at_us, updated_at_us) \
             SELECT value->>0, value->>1, value->>2, value->>3, value->>4, value->>5, value->>6, value->>7, value->>8, value->>9, \
             value->>10, value->>11, value->>12, value->>13, value->>14, value->>15, value->>16, value->>17, value->>18, value->>19 \
             FROM json_each($1) WHERE true \
             ON CONFLICT (hold_id) DO UPDATE SET amount = excluded.amount, remaining = excluded.remaining, added = excluded.added, \
             split_off = excluded.split_off, consumed = excluded.consumed, released = excluded.released, \
             returned_by_children = excluded.returned_by_children, status = excluded.status, \
             expiry_told = excluded.expiry_told, updated_at_us = excluded.updated_at_us",
            book.holds.changes().iter().filter_map(|change| change.after.map(rows::hold)).collect(),
        )
        .await?;
        self.save_operations(book).await?;
        self.save_memory(book).await
    }

    async fn save_operations(&mut self, book: &Book) -> Result<(), Error> {
        let changes = book.operations.changes();
        let (new, moved): (Vec<_>, Vec<_>) =
            changes.iter().partition(|change| change.before.is_none());
        self.put(
            "INSERT INTO operations (operation_id, scope, kind, status, user_id, idempotency_key, external_ref, tx_hash, \
             rejection_code, rejection_message, awaits_chain, reverses, reversed_by, digest, created_at_us, finalized_at_us) \
             SELECT value->>0, value->>1, value->>2, value->>3, value->>4, value->>5, value->>6, value->>7, value->>8, value->>9, \
             value->>10, value->>11, value->>12, value->>13, value->>14, value->>15 FROM json_each($1)",
            new.iter().filter_map(|change| change.after.map(rows::operation)).collect(),
        )
        .await?;
        self.put(
            "UPDATE operations SET status = j.value->>1, tx_hash = j.value->>2, rejection_code = j.value->>3, \
             rejection_message = j.value->>4, reversed_by = j.value->>5, finalized_at_us = j.value->>6 \
             FROM json_each($1) j WHERE operation_id = j.value->>0",
            moved.iter().filter_map(|change| change.after.map(rows::operation_state)).collect(),
        )
        .await?;
        let postings = book.postings.changes();
        self.put(
            "INSERT INTO postings (operation_id, ordinal, posting_id, debit_subaccount_id, credit_subaccount_id, instrument_id, \
             amount, hold_id, unsettled, debit_balance_after, debit_version, credit_balance_after, credit_version, created_at_us) \
             SELECT value->>0, value->>1, value->>2, value->>3, value->>4, value->>5, value->>6, value->>7, value->>8, value->>9, \
             value->>10, value->>11, value->>12, value->>13 FROM json_each($1)",
            postings.iter().filter_map(|change| change.after).flatten().map(rows::posting).collect(),
        )
        .await
    }

    async fn save_memory(&mut self, book: &Book) -> Result<(), Error> {
        self.put(
            "INSERT INTO answers (call, user_id, idempotency_key, digest, outcome, created_at_us) \
             SELECT value->>0, value->>1, value->>2, value->>3, value->>4, value->>5 FROM json_each($1)",
            book.answers.changes().iter().filter_map(|change| {
                let (call, user_id, key) = change.key;
                let answer = change.after?;
                let outcome = outcome_text(&answer.outcome);
                Some(json!([call.code(), &**user_id, &**key, answer.digest, outcome, book.now_us]))
            }).collect(),
        )
        .await?;
        self.put(
            "INSERT INTO sources (source, first_sequence, through_sequence, digest) \
             SELECT value->>0, value->>1, value->>2, value->>3 FROM json_each($1) WHERE true \
             ON CONFLICT (source) DO UPDATE SET first_sequence = excluded.first_sequence, \
             through_sequence = excluded.through_sequence, digest = excluded.digest",
            book.sources
                .changes()
                .iter()
                .filter_map(|change| {
                    let at = change.after?;
                    Some(json!([
                        &**change.key,
                        at.first_sequence,
                        at.through_sequence,
                        at.digest
                    ]))
                })
                .collect(),
        )
        .await?;
        let parked = book.parked.changes();
        self.put(
            "INSERT INTO parked (match_key, tx_hash, reverted, at_us) \
             SELECT value->>0, value->>1, value->>2, value->>3 FROM json_each($1)",
            parked
                .iter()
                .filter_map(|change| {
                    let news = change.after?;
                    Some(json!([
                        &**change.key,
                        news.tx_hash.as_deref(),
                        i32::from(news.reverted),
                        news.at_us
                    ]))
                })
                .collect(),
        )
        .await?;
        self.put(
            "DELETE FROM parked WHERE match_key IN (SELECT value FROM json_each($1))",
            parked
                .iter()
                .filter(|change| change.before.is_some() && change.after.is_none())
                .map(|change| json!(&**change.key))
                .collect(),
        )
        .await
    }

    /// What a command asks of the store alone.
    pub(super) async fn tidy_rows(&mut self, command: &Command) -> Result<(), Error> {
        if let Act::ForgetParked { before_us } = &command.act {
            sqlx::query("DELETE FROM parked WHERE at_us < $1")
                .bind(before_us)
                .execute(&mut *self.tx)
                .await?;
        }
        Ok(())
    }

    async fn put(&mut self, sql: &'static str, items: Vec<Value>) -> Result<(), Error> {
        if items.is_empty() {
            return Ok(());
        }
        sqlx::query(sql)
            .bind(rows::rows(items))
            .execute(&mut *self.tx)
            .await?;
        Ok(())
    }
}
