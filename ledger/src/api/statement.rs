//! Balance as of a time, and statement of a period. A user sees its own sub-accounts; staff and
//! services see all (D32).

use proto::{
    convert::{timestamp_us, to_decimal, to_decimal_minor, to_timestamp_us},
    ledger::v1 as wire,
};
use rpc::{
    Caller,
    page::{self, Key, Page},
};
use tonic::{Response, Status};
use types::{Decimal, Minor};

use super::{Api, convert, reads::failed, refused};
use crate::{Error, model::SubAccount, refusal::Refusal, repo::Line};

type Answer<T> = Result<Response<T>, Status>;

/// Versions of a sub-account that a statement covers. The first page fixes them; the page token
/// carries them.
#[derive(Clone, Copy)]
struct Period {
    opening_version: u64,
    closing_version: u64,
    /// Minor units credited in the period.
    sum_in: i128,
    /// Last version on the previous page.
    after: u64,
}

impl Api {
    /// Returns the current balance, or the balance after the last posting at or before `as_of`.
    pub(super) async fn get_balance(
        &self,
        caller: &Caller,
        message: wire::GetBalanceRequest,
    ) -> Answer<wire::GetBalanceResponse> {
        rpc::context::record_read_context(message.context);
        let row = self.subaccount(caller, &message.subaccount_id).await?;
        let Some(as_of) = message.as_of else {
            let version = row.version;
            let row = convert::to_subaccount(&row);
            return Ok(Response::new(wire::GetBalanceResponse {
                subaccount_id: row.subaccount_id,
                instrument_id: row.instrument_id,
                balance: row.balance,
                held: row.held,
                unsettled: row.unsettled,
                available: row.available,
                version,
            }));
        };
        let at_us = self.require_past_time("as_of", timestamp_us(&as_of))?;
        let version = self
            .store
            .version_through(&row, at_us)
            .await
            .map_err(failed)?;
        let balance = self.store.balance_at(&row, version).await.map_err(failed)?;
        Ok(Response::new(wire::GetBalanceResponse {
            subaccount_id: row.terms.subaccount_id.to_string(),
            instrument_id: row.terms.instrument_id.to_string(),
            balance: decimal(&row, balance),
            version,
            ..Default::default()
        }))
    }

    pub(super) async fn get_statement(
        &self,
        caller: &Caller,
        message: wire::GetStatementRequest,
    ) -> Answer<wire::GetStatementResponse> {
        rpc::context::record_read_context(message.context);
        let from_us = message
            .from
            .as_ref()
            .map(|at| self.require_past_time("from", timestamp_us(at)))
            .transpose()?;
        let to_us = message
            .to
            .as_ref()
            .map(|at| self.require_past_time("to", timestamp_us(at)))
            .transpose()?;
        if let (Some(from_us), Some(to_us)) = (from_us, to_us)
            && from_us > to_us
        {
            return Err(rpc::status::invalid_argument(
                "from",
                "must not be after to",
            ));
        }
        let row = self.subaccount(caller, &message.subaccount_id).await?;
        let hash = page::filter_hash(&[
            &message.subaccount_id,
            &format!("{from_us:?}"),
            &format!("{to_us:?}"),
        ]);
        let page = page::parse(message.pagination, hash)?;
        let period = match &page.after {
            Some(key) => period_of(key, &row).ok_or_else(|| {
                rpc::status::invalid_argument(
                    "pagination.page_token",
                    "is not a token of this statement",
                )
            })?,
            None => self.period(&row, from_us, to_us).await?,
        };
        self.page_of(&row, period, &page).await
    }

    /// Returns the versions whose postings are in [from, to).
    async fn period(
        &self,
        row: &SubAccount,
        from_us: Option<i64>,
        to_us: Option<i64>,
    ) -> Result<Period, Status> {
        let before = async |at_us: Option<i64>, otherwise: u64| match at_us {
            Some(at_us) => {
                self.store
                    .version_through(row, at_us.saturating_sub(1))
                    .await
            }
            None => Ok(otherwise),
        };
        let opening_version = before(from_us, 0).await.map_err(failed)?;
        let closing_version = before(to_us, row.version).await.map_err(failed)?;
        let sum_in = self
            .store
            .credited(row, opening_version, closing_version)
            .await
            .map_err(failed)?;
        Ok(Period {
            opening_version,
            closing_version,
            sum_in,
            after: opening_version,
        })
    }

    async fn page_of(
        &self,
        row: &SubAccount,
        period: Period,
        page: &Page,
    ) -> Answer<wire::GetStatementResponse> {
        let balance_at = async |version| self.store.balance_at(row, version).await.map_err(failed);
        let opening = balance_at(period.opening_version).await?;
        let closing = balance_at(period.closing_version).await?;
        let mut lines = self
            .store
            .lines(row, period.after, period.closing_version, page.rows_limit())
            .await
            .map_err(failed)?;
        let pagination = page.finish(&mut lines, |line| token_of(&period, line));
        let sum_out = period.sum_in - (i128::from(closing.0) - i128::from(opening.0));
        Ok(Response::new(wire::GetStatementResponse {
            subaccount_id: row.terms.subaccount_id.to_string(),
            instrument_id: row.terms.instrument_id.to_string(),
            opening_balance: decimal(row, opening),
            closing_balance: decimal(row, closing),
            sum_in: wide_decimal(row, period.sum_in)?,
            sum_out: wide_decimal(row, sum_out)?,
            opening_version: period.opening_version,
            closing_version: period.closing_version,
            lines: lines.iter().map(|line| to_line(row, line)).collect(),
            pagination: Some(pagination),
        }))
    }

    /// Requires a time that is not in the future.
    fn require_past_time(&self, field: &str, at_us: i64) -> Result<i64, Status> {
        if at_us > self.clock.now_us() {
            return Err(refused(Refusal::invalid(
                field,
                "must not be in the future",
            )));
        }
        Ok(at_us)
    }
}

/// Page token with the period, so that all pages of a statement cover the same versions.
fn token_of(period: &Period, last: &Line) -> Key {
    Key {
        created_us: last.version as i64,
        id: format!(
            "{} {} {}",
            period.opening_version, period.closing_version, period.sum_in
        ),
    }
}

fn period_of(key: &Key, row: &SubAccount) -> Option<Period> {
    let mut parts = key.id.split(' ');
    let period = Period {
        opening_version: parts.next()?.parse().ok()?,
        closing_version: parts.next()?.parse().ok()?,
        sum_in: parts.next()?.parse().ok()?,
        after: u64::try_from(key.created_us).ok()?,
    };
    let is_in_order = period.opening_version <= period.after
        && period.after <= period.closing_version
        && period.closing_version <= row.version
        && (0..1 << 100).contains(&period.sum_in);
    (parts.next().is_none() && is_in_order).then_some(period)
}

fn decimal(row: &SubAccount, minor: Minor) -> Option<proto::common::v1::Decimal> {
    Some(to_decimal_minor(minor.0, row.terms.decimals))
}

fn wide_decimal(
    row: &SubAccount,
    minor: i128,
) -> Result<Option<proto::common::v1::Decimal>, Status> {
    Decimal::new(minor, row.terms.decimals)
        .map(|value| Some(to_decimal(value)))
        .map_err(|error| {
            let what = format!("sum of {}: {error}", row.terms.subaccount_id);
            rpc::status::internal(&Error::Invariant(what))
        })
}

fn to_line(row: &SubAccount, line: &Line) -> wire::StatementLine {
    wire::StatementLine {
        at: Some(to_timestamp_us(line.created_at_us)),
        posting_id: line.posting_id.clone(),
        operation_id: line.operation_id.clone(),
        operation_type: line.kind.code(),
        counterparty_subaccount_id: line.counterparty.to_string(),
        amount: decimal(row, line.amount),
        balance: decimal(row, line.balance),
        version: line.version,
    }
}
