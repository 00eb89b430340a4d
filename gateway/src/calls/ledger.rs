//! The ledger as the market uses it: balances, and the holds behind trading.
//!
//! Holds of the market have `owner = market`; nobody else may release or consume them (`design.md` 4). Ids are derived by the caller, so that every call
//! here may be repeated.

use proto::convert::{decimal, to_monetary_amount_minor};
use proto::ledger::v1::hold_step::Step;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use proto::ledger::v1::{
    BatchMode, CreateHoldRequest, CreateOperationsRequest, GetBalanceRequest, GetHoldRequest,
    GrowHold, Hold, HoldStatus, HoldStep, ListHoldsRequest, ReleaseHoldRequest, ShrinkHold,
};
use rpc::Context;
use tonic::{Code, Status};
use types::{Decimal, Id128, Minor};
use uuid::Uuid;

/// Owner of the market's holds.
pub const OWNER: &str = "market";

/// Holds fetched at once.
const PAGE_SIZE: i32 = 1_000;

/// A sub-account's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balance {
    pub balance: Decimal,
    pub held: Decimal,
    pub unsettled: Decimal,
    pub available: Decimal,
}

/// What the market needs to know of a ledger hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerHold {
    pub hold_id: Id128,
    pub subaccount_id: String,
    pub currency: String,
    /// What it was ever given: original amount and what was added.
    pub amount: Decimal,
    /// What was given back of it.
    pub released: Decimal,
    pub active: bool,
    pub reason: String,
    pub is_child: bool,
    pub created_at_us: i64,
}

/// A hold to make.
pub struct NewHold<'a> {
    pub hold_id: Id128,
    pub subaccount_id: &'a str,
    pub currency: &'a str,
    pub amount: Minor,
    pub decimals: u8,
    pub reason: &'a str,
}

#[derive(Clone)]
pub struct Ledger {
    client: LedgerServiceClient<rpc::Channel>,
}

impl Ledger {
    pub fn new(channel: rpc::Channel) -> Self {
        Self {
            client: LedgerServiceClient::new(channel),
        }
    }

    /// Zero everywhere for a sub-account that does not exist yet.
    pub async fn balance(&self, context: &Context, subaccount_id: &str) -> Result<Balance, Status> {
        let request = GetBalanceRequest {
            context: Some(context.child("market", "").to_proto()),
            subaccount_id: subaccount_id.to_owned(),
            ..Default::default()
        };
        let answer = match self.client.clone().get_balance(request).await {
            Ok(answer) => answer.into_inner(),
            Err(status) if status.code() == Code::NotFound => {
                return Ok(Balance {
                    balance: Decimal::ZERO,
                    held: Decimal::ZERO,
                    unsettled: Decimal::ZERO,
                    available: Decimal::ZERO,
                });
            }
            Err(status) => return Err(away(status)),
        };
        Ok(Balance {
            balance: number(answer.balance.as_ref())?,
            held: number(answer.held.as_ref())?,
            unsettled: number(answer.unsettled.as_ref())?,
            available: number(answer.available.as_ref())?,
        })
    }

    /// Makes the hold, or finds it made: as it now stands. The id is what makes a repeat harmless; a key of its own would bind a refusal to it for ever.
    /// `Insufficient balance` comes back as it is.
    pub async fn create_hold(
        &self,
        context: &Context,
        new: &NewHold<'_>,
    ) -> Result<LedgerHold, Status> {
        let id = new.hold_id.to_string();
        let key = format!("{id}:{}", Uuid::now_v7());
        let request = CreateHoldRequest {
            context: Some(context.child("market", &key).to_proto()),
            hold: Some(Hold {
                hold_id: id,
                subaccount_id: new.subaccount_id.to_owned(),
                amount: Some(to_monetary_amount_minor(
                    new.currency,
                    new.amount.0,
                    new.decimals,
                )),
                reason: new.reason.to_owned(),
                owner: OWNER.to_owned(),
                ..Hold::default()
            }),
        };
        let answer = self.client.clone().create_hold(request).await;
        read_hold(answer.map_err(away)?.into_inner().hold)
    }

    /// Adds available money to a hold, once per key.
    pub async fn grow_hold(
        &self,
        context: &Context,
        key: &str,
        hold: &LedgerHold,
        amount: Minor,
        decimals: u8,
    ) -> Result<(), Status> {
        let step = Step::Grow(GrowHold {
            hold_id: hold.hold_id.to_string(),
            amount: Some(to_monetary_amount_minor(&hold.currency, amount.0, decimals)),
        });
        self.step(context, key, step).await
    }

    /// Gives part of a hold back, once per key.
    pub async fn shrink_hold(
        &self,
        context: &Context,
        key: &str,
        hold: &LedgerHold,
        amount: Minor,
        decimals: u8,
    ) -> Result<(), Status> {
        let step = Step::Shrink(ShrinkHold {
            hold_id: hold.hold_id.to_string(),
            amount: Some(to_monetary_amount_minor(&hold.currency, amount.0, decimals)),
            reason: hold.reason.clone(),
        });
        self.step(context, key, step).await
    }

    /// Gives back what is left of a hold. One that has ended meanwhile is fine.
    pub async fn release_hold(
        &self,
        context: &Context,
        hold_id: Id128,
        reason: &str,
    ) -> Result<(), Status> {
        let id = hold_id.to_string();
        let request = ReleaseHoldRequest {
            context: Some(context.child("market", &format!("release:{id}")).to_proto()),
            hold_id: id,
            reason: reason.to_owned(),
        };
        match self.client.clone().release_hold(request).await {
            Err(status) if rpc::status::reason(&status).as_deref() != Some("HOLD_NOT_ACTIVE") => {
                Err(away(status))
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }

    async fn step(&self, context: &Context, key: &str, step: Step) -> Result<(), Status> {
        let request = CreateOperationsRequest {
            context: Some(context.child("market", key).to_proto()),
            hold_steps: vec![HoldStep {
                step: Some(step),
                before_operation: 0,
            }],
            mode: BatchMode::AllOrNothing.into(),
            ..CreateOperationsRequest::default()
        };
        let answer = self.client.clone().create_operations(request).await;
        answer.map(drop).map_err(away)
    }

    /// `None` for an id the ledger has never seen.
    pub async fn hold(
        &self,
        context: &Context,
        hold_id: Id128,
    ) -> Result<Option<LedgerHold>, Status> {
        let request = GetHoldRequest {
            context: Some(context.child("market", "").to_proto()),
            hold_id: hold_id.to_string(),
        };
        match self.client.clone().get_hold(request).await {
            Ok(answer) => read_hold(answer.into_inner().hold).map(Some),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(away(status)),
        }
    }

    /// Every active hold of the market that is no child of another.
    pub async fn trading_holds(&self, context: &Context) -> Result<Vec<LedgerHold>, Status> {
        let mut holds = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = ListHoldsRequest {
                context: Some(context.child("market", "").to_proto()),
                status: HoldStatus::Active.into(),
                owner: OWNER.to_owned(),
                pagination: Some(proto::common::v1::PaginationRequest {
                    page_size: PAGE_SIZE,
                    page_token,
                }),
                ..ListHoldsRequest::default()
            };
            let answer = self.client.clone().list_holds(request).await;
            let answer = answer.map_err(away)?.into_inner();
            for hold in answer.holds {
                let hold = read_hold(Some(hold))?;
                if !hold.is_child {
                    holds.push(hold);
                }
            }
            page_token = answer
                .pagination
                .map(|page| page.next_page_token)
                .unwrap_or_default();
            if page_token.is_empty() {
                return Ok(holds);
            }
        }
    }
}

/// A transport failure is told as the ledger being away; a refusal goes on as it is.
fn away(status: Status) -> Status {
    match status.code() {
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
            rpc::status::unavailable("Ledger service", 1_000)
        }
        Code::Unauthenticated | Code::PermissionDenied => rpc::status::internal(&status),
        _ => status,
    }
}

fn broken(what: &str) -> Status {
    rpc::status::internal(&std::io::Error::other(format!("ledger answered {what}")))
}

fn number(value: Option<&proto::common::v1::Decimal>) -> Result<Decimal, Status> {
    decimal(value).map_err(|_| broken("without a number"))
}

fn read_hold(hold: Option<Hold>) -> Result<LedgerHold, Status> {
    let hold = hold.ok_or_else(|| broken("without the hold"))?;
    let hold_id = Id128::parse(&hold.hold_id)
        .ok_or_else(|| broken("a hold of the market whose id is no UUID"))?;
    let active = hold.status() == HoldStatus::Active;
    let amount = hold.amount.ok_or_else(|| broken("a hold without amount"))?;
    Ok(LedgerHold {
        hold_id,
        subaccount_id: hold.subaccount_id,
        amount: number(amount.amount.as_ref())?,
        released: match hold.released.as_ref() {
            Some(released) => number(Some(released))?,
            None => Decimal::ZERO,
        },
        currency: amount.currency_code,
        active,
        reason: hold.reason,
        is_child: hold.parent_hold_id.is_some_and(|id| !id.is_empty()),
        created_at_us: hold
            .created_at
            .as_ref()
            .map_or(0, proto::convert::timestamp_us),
    })
}
