//! Row conversion for the writer's connection.

use std::sync::Arc;

use rusqlite::{
    Connection, Params, Row, ToSql,
    types::{FromSql, FromSqlResult, ToSqlOutput, ValueRef},
};
use types::Minor;

use crate::{
    Error,
    model::{Id, SubAccount, SubAccountTerms},
    repo::{
        limits::LimitRow,
        rows::{AccountRow, AnswerRow, HoldRow, OperationRow, PendingReceiptRow, PostingRow},
    },
};

impl ToSql for Id {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::from(&**self))
    }
}

impl FromSql for Id {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        value.as_str().map(Id::from)
    }
}

/// Runs a statement for each key in turn and returns all rows.
pub fn find<K: Params, T>(
    db: &Connection,
    sql: &str,
    keys: impl IntoIterator<Item = K>,
    read: fn(&Row) -> rusqlite::Result<T>,
) -> Result<Vec<T>, Error> {
    let mut statement = db.prepare_cached(sql)?;
    let mut found = Vec::new();
    for key in keys {
        let mut rows = statement.query(key)?;
        while let Some(row) = rows.next()? {
            found.push(read(row)?);
        }
    }
    Ok(found)
}

/// Reads a struct from the columns with the names of its fields.
macro_rules! named {
    ($row:ident, $type:ident { $($field:ident),+ $(,)? }) => {
        Ok($type { $($field: $row.get(stringify!($field))?),+ })
    };
}

pub const SUB_ACCOUNT: &str = "SELECT s.subaccount_id, s.account_id, s.user_id, s.instrument_id, \
     COALESCE((SELECT i.decimals FROM instruments i WHERE i.instrument_id = s.instrument_id), 0), s.may_be_negative, \
     s.created_at_us, s.balance, s.held, s.unsettled, s.version, s.freeze, s.closed, s.updated_at_us, s.last_posting \
     FROM sub_accounts s";

/// Reads a row of [`SUB_ACCOUNT`] by column index, because it is the most frequent read.
pub fn subaccount(row: &Row) -> rusqlite::Result<SubAccount> {
    Ok(SubAccount {
        terms: Arc::new(SubAccountTerms {
            subaccount_id: row.get(0)?,
            account_id: row.get(1)?,
            user_id: row.get(2)?,
            instrument_id: row.get(3)?,
            decimals: row.get(4)?,
            may_be_negative: row.get(5)?,
            created_at_us: row.get(6)?,
        }),
        balance: Minor(row.get(7)?),
        held: Minor(row.get(8)?),
        unsettled: Minor(row.get(9)?),
        version: row.get::<_, i64>(10)?.unsigned_abs(),
        freeze: row.get(11)?,
        closed: row.get(12)?,
        updated_at_us: row.get(13)?,
        last_posting: row.get(14)?,
    })
}

pub fn account(row: &Row) -> rusqlite::Result<AccountRow> {
    named!(
        row,
        AccountRow {
            account_id,
            user_id,
            kind,
            created_at_us,
            updated_at_us
        }
    )
}

pub const OPERATION: &str = "SELECT operation_id, scope, kind, status, user_id, idempotency_key, \
     external_ref, tx_hash, rejection_code, rejection_message, awaits_chain, reverses, \
     reversed_by, digest, created_at_us, finalized_at_us FROM operations";

/// Reads a row of [`OPERATION`] by column index: each name would be searched among all columns.
pub fn operation(row: &Row) -> rusqlite::Result<OperationRow> {
    Ok(OperationRow {
        operation_id: row.get(0)?,
        scope: row.get(1)?,
        kind: row.get(2)?,
        status: row.get(3)?,
        user_id: row.get(4)?,
        idempotency_key: row.get(5)?,
        external_ref: row.get(6)?,
        tx_hash: row.get(7)?,
        rejection_code: row.get(8)?,
        rejection_message: row.get(9)?,
        awaits_chain: row.get(10)?,
        reverses: row.get(11)?,
        reversed_by: row.get(12)?,
        digest: row.get(13)?,
        created_at_us: row.get(14)?,
        finalized_at_us: row.get(15)?,
    })
}

pub fn posting(row: &Row) -> rusqlite::Result<PostingRow> {
    named!(
        row,
        PostingRow {
            posting_id,
            operation_id,
            ordinal,
            debit_subaccount_id,
            credit_subaccount_id,
            instrument_id,
            decimals,
            amount,
            hold_id,
            unsettled,
            debit_balance_after,
            debit_version,
            credit_balance_after,
            credit_version,
            created_at_us,
        }
    )
}

pub fn hold(row: &Row) -> rusqlite::Result<HoldRow> {
    named!(
        row,
        HoldRow {
            hold_id,
            subaccount_id,
            user_id,
            instrument_id,
            decimals,
            amount,
            remaining,
            added,
            split_off,
            consumed,
            released,
            returned_by_children,
            status,
            expiry_told,
            reason,
            owner,
            parent_hold_id,
            destination_subaccount_id,
            expires_at_us,
            created_at_us,
            updated_at_us,
        }
    )
}

pub fn answer(row: &Row) -> rusqlite::Result<AnswerRow> {
    named!(
        row,
        AnswerRow {
            call,
            user_id,
            idempotency_key,
            digest,
            outcome
        }
    )
}

pub fn pending_receipt(row: &Row) -> rusqlite::Result<PendingReceiptRow> {
    named!(
        row,
        PendingReceiptRow {
            match_key,
            tx_hash,
            reverted,
            at_us
        }
    )
}

pub fn limit(row: &Row) -> rusqlite::Result<LimitRow> {
    named!(
        row,
        LimitRow {
            limit_id,
            user_id,
            account_kind,
            instrument_id,
            decimals,
            side,
            window_s,
            amount,
            kinds,
            created_at_us,
            updated_at_us,
        }
    )
}
