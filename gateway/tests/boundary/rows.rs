//! Matching rules, checked by a client's reads of trades, order book and events.

use proto::common::v1::PaginationRequest;
use proto::market::v1::*;
use tonic::Code;
use tonic_types::StatusExt;
use types::Side;

use crate::orders::text;
use crate::world::*;

/// A world with the sellers ann and eve, and the buyers bob and dan.
async fn members(folder: &std::path::Path) -> World {
    let mut world = World::with(folder, Settings::unsettled()).await;
    for user_id in ["ann", "eve"] {
        world.user(user_id, "0", "1000").await;
    }
    for user_id in ["bob", "dan"] {
        world.user(user_id, "100000", "0").await;
    }
    world
}

fn level(price: &str, quantity: &str) -> (String, String) {
    (price.to_owned(), quantity.to_owned())
}

/// Trades of a user, oldest first: buy order, sell order, price, quantity.
async fn fills(world: &World, user_id: &str) -> Vec<(String, String, String, String)> {
    let mut trades = world.trades(user_id).await;
    trades.reverse();
    let shown = |trade: &Trade| {
        (
            trade.buy_order_id.clone(),
            trade.sell_order_id.clone(),
            text(&trade.price).to_owned(),
            text(&trade.quantity).to_owned(),
        )
    };
    trades.iter().map(shown).collect()
}

fn fill(
    bought: &Order,
    sold: &Order,
    price: &str,
    quantity: &str,
) -> (String, String, String, String) {
    (
        bought.order_id.clone(),
        sold.order_id.clone(),
        price.to_owned(),
        quantity.to_owned(),
    )
}

// rows: R162 R163 R170
#[tokio::test]
async fn r162_r163_r170_taker_follows_price_time_priority() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path()).await;
    let far = world.place(sell("ann", "102", "1")).await.unwrap();
    let early = world.place(sell("ann", "101", "2")).await.unwrap();
    let late = world.place(sell("eve", "101", "3")).await.unwrap();
    let best = world.place(sell("eve", "100", "4")).await.unwrap();
    let bought = world.place(buy("bob", "102", "10")).await.unwrap();
    assert_eq!(bought.status(), OrderStatus::Filled);
    assert_eq!(
        fills(&world, "bob").await,
        [
            fill(&bought, &best, "100.00", "4"),
            fill(&bought, &early, "101.00", "2"),
            fill(&bought, &late, "101.00", "3"),
            fill(&bought, &far, "102.00", "1"),
        ]
    );
    // A sell trades with the highest bid first.
    let far = world.place(buy("bob", "50", "1")).await.unwrap();
    let early = world.place(buy("bob", "51", "2")).await.unwrap();
    let late = world.place(buy("dan", "51", "3")).await.unwrap();
    let best = world.place(buy("dan", "52", "4")).await.unwrap();
    let sold = world.place(sell("ann", "50", "10")).await.unwrap();
    assert_eq!(sold.status(), OrderStatus::Filled);
    assert_eq!(
        fills(&world, "ann").await.split_off(2),
        [
            fill(&best, &sold, "52.00", "4"),
            fill(&early, &sold, "51.00", "2"),
            fill(&late, &sold, "51.00", "3"),
            fill(&far, &sold, "50.00", "1"),
        ]
    );
    assert_eq!(world.book().await, (vec![], vec![]));
    world.stop().await;
}

/// Each trade has one event. The event of a later order ends the read.
// rows: R156
#[tokio::test]
async fn r156_there_are_as_many_trade_events_as_trades() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path()).await;
    for price in ["100", "101", "102"] {
        world.place(sell("ann", price, "1")).await.unwrap();
    }
    world.place(buy("bob", "102", "3")).await.unwrap();
    let last = world.place(buy("bob", "1", "1")).await.unwrap();
    let events = world.events(events::topics::MARKET, 8, |_| true).await;
    let placed: OrderPlacedEvent = prost::Message::decode(&*events[7].payload).unwrap();
    assert_eq!(placed.order_id, last.order_id);
    let published: Vec<String> = events
        .iter()
        .filter(|event| event.short_type() == "TradeExecutedEvent")
        .map(|event| {
            let event: TradeExecutedEvent = prost::Message::decode(&*event.payload).unwrap();
            event.trade_id
        })
        .collect();
    let mut trades = world.trades("bob").await;
    trades.reverse();
    let ids: Vec<String> = trades.into_iter().map(|trade| trade.trade_id).collect();
    assert_eq!((published.len(), published), (3, ids));
    world.stop().await;
}

// rows: R164 R165 R168
#[tokio::test]
async fn r164_r165_r168_orders_match_at_an_equal_price_and_not_one_tick_away() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path()).await;
    world.place(sell("ann", "100", "5")).await.unwrap();
    let below = world.place(buy("bob", "99.99", "5")).await.unwrap();
    assert_eq!(below.status(), OrderStatus::Open);
    let apart = (vec![level("99.99", "5")], vec![level("100.00", "5")]);
    assert_eq!(world.book().await, apart);
    let equal = world.place(buy("bob", "100", "2")).await.unwrap();
    assert_eq!(equal.status(), OrderStatus::Filled);
    let left = (vec![level("99.99", "5")], vec![level("100.00", "3")]);
    assert_eq!(world.book().await, left);
    // A sell above the best bid rests. A sell at the best bid trades.
    let above = world.place(sell("eve", "100", "1")).await.unwrap();
    assert_eq!(above.status(), OrderStatus::Open);
    let equal = world.place(sell("eve", "99.99", "5")).await.unwrap();
    assert_eq!(equal.status(), OrderStatus::Filled);
    // A filled level is no longer in the book.
    let left = (vec![], vec![level("100.00", "4")]);
    assert_eq!(world.book().await, left);
    world.stop().await;
}

// rows: R166 R167 R168 R169 R324
#[tokio::test]
async fn r166_r167_r169_smaller_quantity_trades_at_resting_price() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path()).await;
    let sold = world.place(sell("ann", "100", "7")).await.unwrap();
    let bought = world.place(buy("bob", "105", "10")).await.unwrap();
    assert_eq!(bought.status(), OrderStatus::PartiallyFilled);
    let shown = (text(&bought.filled_quantity), text(&bought.average_price));
    assert_eq!(shown, ("7", "100"));
    let trades = fills(&world, "bob").await;
    assert_eq!(trades, [fill(&bought, &sold, "100.00", "7")]);
    let gone = world.order(&sold.order_id).await.unwrap();
    assert_eq!(gone.status(), OrderStatus::Filled);
    // The remainder rests at the order's price.
    let left = (vec![level("105.00", "3")], vec![]);
    assert_eq!(world.book().await, left);
    // Now the resting order is the larger one, and the sell's price is below it.
    let sold = world.place(sell("eve", "95", "1")).await.unwrap();
    assert_eq!(sold.status(), OrderStatus::Filled);
    let trades = fills(&world, "eve").await;
    assert_eq!(trades, [fill(&bought, &sold, "105.00", "1")]);
    let left = (vec![level("105.00", "2")], vec![]);
    assert_eq!(world.book().await, left);
    world.stop().await;
}

// rows: R171 R172 R157
#[tokio::test]
async fn r171_r172_ioc_never_rests_and_fok_is_all_or_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path()).await;
    let hasty = |time_in_force: TimeInForce, quantity: &str| Order {
        time_in_force: time_in_force.into(),
        ..buy("bob", "100", quantity)
    };
    let ended = |order: &Order| {
        let filled = text(&order.filled_quantity).to_owned();
        (order.status(), order.cancel_reason.clone(), filled)
    };
    let cancelled =
        |reason: &str, filled: &str| (OrderStatus::Cancelled, reason.to_owned(), filled.to_owned());
    world.place(sell("ann", "100", "4")).await.unwrap();
    let ioc = world.place(hasty(TimeInForce::Ioc, "10")).await.unwrap();
    assert_eq!(ended(&ioc), cancelled("IOC_REMAINDER", "4"));
    assert_eq!(world.book().await, (vec![], vec![]));

    // Nine of ten lots are available, at two prices. The tenth is above the limit.
    world.place(sell("ann", "99", "5")).await.unwrap();
    world.place(sell("eve", "100", "4")).await.unwrap();
    world.place(sell("eve", "100.01", "1")).await.unwrap();
    let before = world.book().await;
    let fok = world.place(hasty(TimeInForce::Fok, "10")).await.unwrap();
    assert_eq!(ended(&fok), cancelled("FOK_NOT_FILLABLE", "0"));
    assert_eq!(world.book().await, before);
    assert_eq!(world.trades("bob").await.len(), 1);
    let whole = world.place(hasty(TimeInForce::Fok, "9")).await.unwrap();
    assert_eq!(whole.status(), OrderStatus::Filled);
    assert_eq!(world.book().await, (vec![], vec![level("100.01", "1")]));

    let published = world
        .events(events::topics::MARKET, 2, |event| {
            event.short_type() == "OrderCancelledEvent"
        })
        .await;
    let published: Vec<(String, String)> = published
        .iter()
        .map(|event| {
            let event: OrderCancelledEvent = prost::Message::decode(&*event.payload).unwrap();
            (event.order_id, event.reason)
        })
        .collect();
    let wanted = [(ioc, "IOC_REMAINDER"), (fok, "FOK_NOT_FILLABLE")];
    assert_eq!(
        published,
        wanted.map(|(order, reason)| (order.order_id, reason.to_owned()))
    );
    world.stop().await;
}

/// D36: the fee is 0.1 %, rounded half up to a kopeck. The fees of an order's fills sum to the fee
/// of its traded value.
// rows: R176 R305
#[tokio::test]
async fn r176_the_fee_is_rounded_half_up_over_the_fills_of_an_order() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path()).await;
    for (price, quantity) in [("4.99", "1"), ("5", "1"), ("14.99", "1"), ("100", "10")] {
        world.place(sell("ann", price, quantity)).await.unwrap();
        world.place(buy("bob", price, quantity)).await.unwrap();
    }
    for seller in ["ann", "eve"] {
        world.place(sell(seller, "5", "1")).await.unwrap();
    }
    world.place(buy("dan", "5", "2")).await.unwrap();
    let fees = async |user_id: &str| {
        let mut trades = world.trades(user_id).await;
        trades.reverse();
        let fee = |trade: &Trade| {
            let fee = trade.fee.clone().unwrap();
            let amount = fee.amount.unwrap();
            assert_eq!((&*fee.fee_type, &*amount.currency_code), ("TRADING", "RUB"));
            text(&amount.amount).to_owned()
        };
        trades.iter().map(fee).collect::<Vec<_>>()
    };
    assert_eq!(fees("bob").await, ["0.00", "0.01", "0.01", "1.00"]);
    assert_eq!(fees("dan").await, ["0.01", "0.00"]);
    world.stop().await;
}

/// T22: a smaller quantity keeps queue priority. Another price or a larger quantity loses it.
// rows: R143 R328
#[tokio::test]
async fn r143_less_keeps_priority_and_more_loses_it() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path()).await;
    let first = world.place(buy("bob", "10", "5")).await.unwrap();
    let second = world.place(buy("dan", "10", "5")).await.unwrap();
    let amend = async |price: Option<&str>, quantity: Option<&str>| {
        let request = AmendOrderRequest {
            context: context(&unique()),
            order_id: first.order_id.clone(),
            price: price.and_then(decimal),
            quantity: quantity.and_then(decimal),
            new_client_order_id: String::new(),
        };
        let answer = world.trader("bob").amend_order(request).await.unwrap();
        let amended = answer.into_inner().order.unwrap();
        assert_eq!(amended.order_id, first.order_id);
    };
    let next = async || {
        world.place(sell("ann", "10", "1")).await.unwrap();
        world.trades("ann").await[0].buy_order_id.clone()
    };
    amend(None, Some("3")).await;
    assert_eq!(
        next().await,
        first.order_id,
        "a smaller quantity keeps priority"
    );
    amend(None, Some("6")).await;
    assert_eq!(
        next().await,
        second.order_id,
        "a larger quantity loses priority"
    );
    amend(Some("11"), None).await;
    assert_eq!(next().await, first.order_id, "a better price trades first");
    amend(Some("10"), None).await;
    assert_eq!(
        next().await,
        second.order_id,
        "a return to the price is last in its queue"
    );
    world.stop().await;
}

// rows: R141 R339
#[tokio::test]
async fn r141_trades_are_listed_by_user_and_instrument_page_by_page() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path()).await;
    for buyer in ["bob", "dan", "bob"] {
        world.place(sell("ann", "10", "1")).await.unwrap();
        world.place(buy(buyer, "10", "1")).await.unwrap();
    }
    let list = |user_id: &str, instrument_id: &str| ListTradesRequest {
        context: None,
        user_id: user_id.into(),
        instrument_id: instrument_id.into(),
        pagination: None,
    };
    let mut operator = world.operator();
    for (request, count) in [
        (list("", ""), 3),
        (list("", BOND), 3),
        (list("ann", ""), 3),
        (list("bob", BOND), 2),
        (list("dan", BOND), 1),
        (list("eve", ""), 0),
        (list("bob", "NO-SUCH"), 0),
    ] {
        let answer = operator.list_trades(request.clone()).await.unwrap();
        assert_eq!(answer.get_ref().trades.len(), count, "{request:?}");
    }
    // A user sees only its own trades, without a filter too.
    let own = world.trader("bob").list_trades(list("", "")).await.unwrap();
    assert_eq!(own.into_inner().trades.len(), 2);
    let foreign = world.trader("bob").list_trades(list("dan", "")).await;
    assert_eq!(foreign.unwrap_err().code(), Code::PermissionDenied);
    let mut request = list("ann", BOND);
    let mut pages = Vec::new();
    let mut page_token = String::new();
    loop {
        request.pagination = Some(PaginationRequest {
            page_size: 2,
            page_token,
        });
        let answer = operator.list_trades(request.clone()).await.unwrap();
        let answer = answer.into_inner();
        pages.push(answer.trades);
        assert!(pages.len() < 9, "the list has a last page");
        page_token = answer.pagination.unwrap().next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(pages.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
    let whole = operator.list_trades(list("ann", BOND)).await.unwrap();
    assert_eq!(pages.concat(), whole.into_inner().trades);
    world.stop().await;
}

/// Every role makes every call of the market with an empty request. A caller without the role gets
/// ROLE_REQUIRED, any other caller an answer or another error.
// rows: R333
#[tokio::test]
async fn r333_each_call_of_the_market_admits_its_roles_alone() {
    const TRADE: &str = "investor trader";
    const CANCEL: &str = "investor trader operator market-supervisor service";
    const SUPERVISE: &str = "operator market-supervisor service";
    const STAFF: &str = "operator treasury compliance market-supervisor auditor service";
    const EVERYONE: &str =
        "investor trader issuer operator treasury compliance market-supervisor auditor service";
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "0", "0").await;
    for role in EVERYONE.split(' ') {
        let token = match role {
            "investor" | "trader" | "issuer" => format!("sandbox.{role}.ann"),
            _ => format!("sandbox.{role}"),
        };
        let mut market = world.as_caller(&token);
        macro_rules! admits {
            ($($call:ident($request:ident): $roles:expr),* $(,)?) => {$(
                let refusal = market.$call($request::default()).await.err().map(refused);
                let is_denied = refusal.is_some_and(|refusal| refusal.2 == "ROLE_REQUIRED");
                let is_admitted = $roles.split(' ').any(|admitted| admitted == role);
                assert_eq!(is_denied, !is_admitted, "{role} {}", stringify!($call));
            )*};
        }
        admits! {
            place_order(PlaceOrderRequest): TRADE,
            amend_order(AmendOrderRequest): TRADE,
            cancel_order(CancelOrderRequest): CANCEL,
            mass_cancel(MassCancelRequest): CANCEL,
            set_kill_switch(SetKillSwitchRequest): CANCEL,
            open_trading_hold(OpenTradingHoldRequest): TRADE,
            adjust_trading_hold(AdjustTradingHoldRequest): "investor trader service",
            close_trading_hold(CloseTradingHoldRequest): TRADE,
            set_trading_phase(SetTradingPhaseRequest): SUPERVISE,
            confirm_clock(ConfirmClockRequest): SUPERVISE,
            set_member_bounds(SetMemberBoundsRequest): SUPERVISE,
            set_member_group(SetMemberGroupRequest): SUPERVISE,
            get_order(GetOrderRequest): EVERYONE,
            list_orders(ListOrdersRequest): EVERYONE,
            get_trade(GetTradeRequest): EVERYONE,
            list_trades(ListTradesRequest): EVERYONE,
            get_order_book(GetOrderBookRequest): EVERYONE,
            list_trading_holds(ListTradingHoldsRequest): EVERYONE,
            get_position(GetPositionRequest): EVERYONE,
            get_market_status(GetMarketStatusRequest): EVERYONE,
            list_audit_records(ListAuditRecordsRequest): STAFF,
        }
    }
    world.stop().await;
}

/// The market's lists refuse invalid page parameters and name the field.
// rows: R339 R341
#[tokio::test]
async fn r339_r341_lists_refuse_a_bad_page_under_its_field() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path()).await;
    let mut operator = world.operator();
    for (page_size, page_token, field) in [
        (-1, "", "pagination.page_size"),
        (2, "made up", "pagination.page_token"),
    ] {
        let pagination = Some(PaginationRequest {
            page_size,
            page_token: page_token.into(),
        });
        let orders = ListOrdersRequest {
            pagination: pagination.clone(),
            ..Default::default()
        };
        let trades = ListTradesRequest {
            pagination,
            ..Default::default()
        };
        for refusal in [
            operator.list_orders(orders).await.unwrap_err(),
            operator.list_trades(trades).await.unwrap_err(),
        ] {
            assert_eq!(refusal.code(), Code::InvalidArgument, "{refusal}");
            let bad = refusal.get_details_bad_request().unwrap();
            assert_eq!(bad.field_violations[0].field, field);
        }
    }
    // Without a size a page has 50 rows; a larger size is reduced to the maximum.
    const ORDERS: u64 = 1_001;
    let (bob, mut of_bob) = world.session(with_money("bob", "b")).await;
    for id in 1..=ORDERS {
        let order = wire_order(id, Side::Buy, 1_000, 1);
        bob.send(0, order).await.unwrap();
    }
    until(&mut of_bob, |m| {
        ack(m).filter(|ack| ack.client_order_id == ORDERS)
    })
    .await;
    let orders = |page_size, page_token: &str, user: &str| ListOrdersRequest {
        user_id: user.into(),
        pagination: Some(PaginationRequest {
            page_size,
            page_token: page_token.into(),
        }),
        ..Default::default()
    };
    let mut next = String::new();
    for (page_size, rows) in [(0, 50), (1_000_000, 1_000)] {
        let answer = operator.list_orders(orders(page_size, "", "")).await;
        let answer = answer.unwrap().into_inner();
        assert_eq!(answer.orders.len(), rows);
        next = answer.pagination.unwrap().next_page_token;
        assert!(!next.is_empty());
    }
    let last = operator.list_orders(orders(0, &next, "")).await.unwrap();
    assert_eq!(last.into_inner().orders.len(), 1);
    // A token belongs to the filters that it was given for.
    let refusal = operator.list_orders(orders(0, &next, "bob")).await;
    let bad = refusal.unwrap_err().get_details_bad_request().unwrap();
    assert_eq!(bad.field_violations[0].field, "pagination.page_token");
    world.stop().await;
}
