//! Market double: one trading hold.

use proto::convert;
use proto::ledger::v1::AdjustHoldRequest;
use proto::market::v1::market_service_server::MarketService;
use proto::market::v1::*;
use tonic::{Request, Response, Status};

use super::{ServiceDoubles, unimplemented_methods};
use crate::messages::{amount, context, fresh};

#[tonic::async_trait]
impl MarketService for ServiceDoubles {
    async fn list_trading_holds(
        &self,
        request: Request<ListTradingHoldsRequest>,
    ) -> Result<Response<ListTradingHoldsResponse>, Status> {
        let user_id = request.into_inner().user_id;
        self.with(|state| {
            if state.market_unavailable {
                return Err(rpc::status::unavailable("Market", 100));
            }
            state.trail.push(format!("trading holds {user_id}"));
            Ok(Response::new(ListTradingHoldsResponse {
                trading_holds: state.trading_hold.clone().into_iter().collect(),
                pagination: None,
            }))
        })
    }

    /// Answers first, then changes the ledger, as the market does.
    async fn adjust_trading_hold(
        &self,
        request: Request<AdjustTradingHoldRequest>,
    ) -> Result<Response<AdjustTradingHoldResponse>, Status> {
        let AdjustTradingHoldRequest {
            hold_id, undrawn, ..
        } = request.into_inner();
        let (hold, ledger) = self.with(|state| {
            let value = undrawn.as_ref().map_or("", |undrawn| &undrawn.value);
            state.trail.push(format!("adjust {hold_id} {value}"));
            let hold = state.trading_hold.as_mut().expect("a trading hold");
            hold.undrawn = undrawn;
            (hold.clone(), state.ledger.clone())
        });
        let [undrawn, drawn] = [&hold.undrawn, &hold.drawn]
            .map(|value| convert::decimal(value.as_ref()).expect("number"));
        let rest = undrawn.checked_add(drawn).expect("sum");
        let mut ledger = ledger.expect("a ledger");
        let remaining_amount = amount(&hold.instrument_id, &rest.to_string());
        tokio::spawn(async move {
            let request = AdjustHoldRequest {
                context: context(&fresh()),
                hold_id,
                remaining_amount,
            };
            ledger.adjust_hold(request).await.expect("adjusted");
        });
        let trading_hold = Some(hold);
        Ok(Response::new(AdjustTradingHoldResponse { trading_hold }))
    }

    async fn mass_cancel(
        &self,
        request: Request<MassCancelRequest>,
    ) -> Result<Response<MassCancelResponse>, Status> {
        let MassCancelRequest {
            user_id,
            instrument_id,
            ..
        } = request.into_inner();
        self.with(|state| {
            if state.market_unavailable {
                return Err(rpc::status::unavailable("Market", 100));
            }
            state
                .trail
                .push(format!("cancel orders {user_id} {instrument_id}"));
            Ok(Response::new(MassCancelResponse { cancelled: 0 }))
        })
    }

    unimplemented_methods!(
        place_order: PlaceOrderRequest => PlaceOrderResponse,
        cancel_order: CancelOrderRequest => CancelOrderResponse,
        amend_order: AmendOrderRequest => AmendOrderResponse,
        get_order: GetOrderRequest => GetOrderResponse,
        list_orders: ListOrdersRequest => ListOrdersResponse,
        get_trade: GetTradeRequest => GetTradeResponse,
        list_trades: ListTradesRequest => ListTradesResponse,
        get_order_book: GetOrderBookRequest => GetOrderBookResponse,
        get_position: GetPositionRequest => GetPositionResponse,
        open_trading_hold: OpenTradingHoldRequest => OpenTradingHoldResponse,
        close_trading_hold: CloseTradingHoldRequest => CloseTradingHoldResponse,
        set_trading_phase: SetTradingPhaseRequest => SetTradingPhaseResponse,
        set_kill_switch: SetKillSwitchRequest => SetKillSwitchResponse,
        set_member_bounds: SetMemberBoundsRequest => SetMemberBoundsResponse,
        set_member_group: SetMemberGroupRequest => SetMemberGroupResponse,
        confirm_clock: ConfirmClockRequest => ConfirmClockResponse,
        get_market_status: GetMarketStatusRequest => GetMarketStatusResponse,
        list_audit_records: ListAuditRecordsRequest => ListAuditRecordsResponse,
    );
}
