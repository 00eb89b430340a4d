//! Client of the market: a user's trading hold and open orders.

use async_recursion::async_recursion as boxed;
use proto::convert::to_decimal_minor;
use proto::market::v1 as pb;
use proto::market::v1::market_service_client::MarketServiceClient;
use rpc::Context;
use types::{CFA_RUB, Id128, Minor};

use crate::Answer;
use crate::convert::kopecks;
use crate::policy::{call, client};

/// A user's open trading hold of CFA-RUB, in kopecks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TradingHold {
    pub hold_id: Id128,
    /// Amount that no open order draws. It may be withdrawn.
    pub undrawn: Minor,
    /// Reserved by open orders.
    pub drawn: Minor,
}

client! {
    /// Client of the market.
    MarketClient, MarketServiceClient, "Market service"
}

impl MarketClient {
    /// The user's open trading hold of CFA-RUB; `None` if there is none.
    #[boxed]
    pub async fn trading_hold(
        &self,
        context: &Context,
        user_id: &str,
    ) -> Answer<Option<TradingHold>> {
        let request = pb::ListTradingHoldsRequest {
            context: self.peer.context(context),
            user_id: user_id.to_owned(),
            instrument_id: CFA_RUB.to_owned(),
            pagination: None,
        };
        let listed = self.peer.call(request, call!(list_trading_holds)).await?;
        // Newest first; at most one is open.
        let mut holds = listed.trading_holds.into_iter();
        let Some(open) = holds.find(|hold| hold.status() == pb::TradingHoldStatus::Open) else {
            return Ok(None);
        };
        let amount = |value| kopecks(value).map_err(|what| self.peer.malformed_response(what));
        let hold_id = Id128::parse(&open.hold_id);
        Ok(Some(TradingHold {
            hold_id: hold_id
                .ok_or_else(|| self.peer.malformed_response("hold id is not a UUID"))?,
            undrawn: amount(open.undrawn.as_ref())?,
            drawn: amount(open.drawn.as_ref())?,
        }))
    }

    /// Sets the undrawn amount, once per key. The ledger may make the released money available
    /// shortly after the answer.
    #[boxed]
    pub async fn set_undrawn(
        &self,
        context: &Context,
        key: &str,
        hold_id: Id128,
        undrawn: Minor,
    ) -> Answer<()> {
        let request = pb::AdjustTradingHoldRequest {
            context: self.peer.keyed(context, key),
            hold_id: hold_id.to_string(),
            undrawn: Some(to_decimal_minor(undrawn.0, 2)),
        };
        self.peer.send(request, call!(adjust_trading_hold)).await
    }

    /// Cancels a user's open orders on an instrument, or on all instruments if `instrument_id` is
    /// empty, once per key. Returns how many it has cancelled.
    #[boxed]
    pub async fn cancel_orders(
        &self,
        context: &Context,
        key: &str,
        user_id: &str,
        instrument_id: &str,
    ) -> Answer<u32> {
        let request = pb::MassCancelRequest {
            context: self.peer.keyed(context, key),
            user_id: user_id.to_owned(),
            instrument_id: instrument_id.to_owned(),
            side: pb::OrderSide::Unspecified.into(),
        };
        let answer = self.peer.call(request, call!(mass_cancel)).await?;
        Ok(answer.cancelled)
    }
}
