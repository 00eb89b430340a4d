//! Verification of a run: reads the rows of the closed ledger and the trial balance of the service.

use proto::ledger::v1::TrialBalanceLine;

use super::database::Database;

/// Violations, each with the query that counts it.
const VIOLATIONS: [(&str, &str); 6] = [
    (
        "operations without postings or with accounts of different instruments",
        "SELECT COUNT(*) FROM operations o WHERE NOT EXISTS (SELECT 1 FROM postings p \
        WHERE p.operation_id = o.operation_id) \
         OR EXISTS (SELECT 1 FROM postings p JOIN sub_accounts d ON d.subaccount_id = p.debit_subaccount_id \
         JOIN sub_accounts c ON c.subaccount_id = p.credit_subaccount_id WHERE p.operation_id = o.operation_id \
         AND (d.instrument_id <> p.instrument_id OR c.instrument_id <> p.instrument_id))",
    ),
    (
        "instruments whose balances do not sum to zero",
        "SELECT COUNT(*) FROM (SELECT 1 FROM sub_accounts GROUP BY instrument_id HAVING SUM(balance) <> 0) i",
    ),
    (
        "sub-accounts that differ from the sum of their postings",
        "SELECT COUNT(*) FROM sub_accounts s LEFT JOIN (SELECT id, SUM(amount) AS amount, COUNT(*) AS entries FROM \
        (SELECT debit_subaccount_id AS id, -amount AS amount FROM postings \
        UNION ALL SELECT credit_subaccount_id, amount FROM postings) sides \
         GROUP BY id) e ON e.id = s.subaccount_id \
         WHERE s.balance <> COALESCE(e.amount, 0) OR s.version <> COALESCE(e.entries, 0)",
    ),
    (
        "postings whose running balance does not continue the previous one",
        "SELECT COUNT(*) FROM (SELECT after - amount AS before, version, LAG(after, 1, 0) OVER w AS last_after, \
         LAG(version, 1, 0) OVER w AS last_version FROM \
        (SELECT debit_subaccount_id AS id, debit_version AS version, debit_balance_after AS after, \
        -amount AS amount FROM postings \
         UNION ALL SELECT credit_subaccount_id, credit_version, credit_balance_after, amount FROM postings) sides \
        WINDOW w AS (PARTITION BY id ORDER BY version)) entries \
        WHERE before <> last_after OR version <> last_version + 1",
    ),
    (
        "sub-accounts whose held amount differs from their open holds",
        "SELECT COUNT(*) FROM sub_accounts s LEFT JOIN \
        (SELECT subaccount_id, SUM(remaining) AS held FROM holds WHERE status = 1 \
         GROUP BY subaccount_id) h ON h.subaccount_id = s.subaccount_id WHERE s.held <> COALESCE(h.held, 0)",
    ),
    (
        "idempotency keys with more than one operation",
        "SELECT COUNT(*) FROM (SELECT 1 FROM operations \
        GROUP BY user_id, idempotency_key, scope HAVING COUNT(*) > 1) keys",
    ),
];

/// Verifies a closed ledger with this many operations.
///
/// # Errors
/// A query finds a violation, or the rows cannot be read.
pub async fn verify_rows(database: &Database, operations: usize) -> anyhow::Result<()> {
    for (violation, sql) in VIOLATIONS {
        let count = database.number(sql, sql).await?;
        anyhow::ensure!(count == 0, "{violation}: {count}");
    }
    let sql = "SELECT COUNT(*) FROM operations";
    let found = database.number(sql, sql).await?;
    anyhow::ensure!(
        usize::try_from(found) == Ok(operations),
        "the ledger has {found} operations, {operations} were answered"
    );
    Ok(())
}

/// Verifies the trial balance that the ledger returned.
///
/// # Errors
/// The balances of an instrument do not sum to zero.
pub fn verify_trial_balance(lines: &[TrialBalanceLine]) -> anyhow::Result<()> {
    anyhow::ensure!(!lines.is_empty(), "the trial balance is empty");
    for line in lines {
        let total = line.total.as_ref().map_or("", |total| &total.value);
        let is_zero = total.parse::<f64>().is_ok_and(|total| total == 0.0);
        anyhow::ensure!(
            is_zero,
            "balances of {} sum to {total}, expected 0",
            line.instrument_id
        );
    }
    Ok(())
}

/// Mean operations per transaction, without the first `skip` operations.
///
/// # Errors
/// The rows cannot be read.
pub async fn operations_per_transaction(database: &Database, skip: usize) -> anyhow::Result<f64> {
    // All rows of a transaction have the same time.
    let count_of = |column: &str| {
        let rows = "FROM (SELECT created_at_us FROM operations ORDER BY created_at_us";
        [
            format!("SELECT COUNT({column}) {rows} LIMIT -1 OFFSET {skip}) o"),
            format!("SELECT COUNT({column}) {rows} OFFSET {skip}) o"),
        ]
    };
    let [sqlite, postgres] = count_of("*");
    let operations = database.number(&sqlite, &postgres).await?;
    let [sqlite, postgres] = count_of("DISTINCT created_at_us");
    let groups = database.number(&sqlite, &postgres).await?;
    Ok(operations as f64 / (groups as f64).max(1.0))
}
