//! Matching rules of specification 4.5 and 1.3 as scripts of commands and expected events.

mod support;

use support::*;

#[test]
fn r162_best_price_first_then_time() {
    run("
        new 1 sell 101 x5
            accepted 1 101 open 5 rests
        new 2 sell 100 x5
            accepted 2 100 open 5 rests
        new 3 sell 101 x5
            accepted 3 101 open 5 rests
        new 4 buy 101 x12
            accepted 4 101 open 12
            trade maker 2 taker 4 100 x5 open 0 7
            trade maker 1 taker 4 101 x5 open 0 2
            trade maker 3 taker 4 101 x2 open 3 0
        new 5 buy 98 x1
            accepted 5 98 open 1 rests
        new 6 buy 99 x1
            accepted 6 99 open 1 rests
        new 7 sell 98 x2
            accepted 7 98 open 2
            trade maker 6 taker 7 99 x1 open 0 1
            trade maker 5 taker 7 98 x1 open 0 0
    ");
}

#[test]
fn r163_equal_price_earlier_order_first() {
    run("
        new 2 buy 100 x5
            accepted 2 100 open 5 rests
        new 1 buy 100 x5
            accepted 1 100 open 5 rests
        new 3 sell 100 x6
            accepted 3 100 open 6
            trade maker 2 taker 3 100 x5 open 0 1
            trade maker 1 taker 3 100 x1 open 4 0
    ");
}

#[test]
fn r164_buy_matches_up_to_its_price_and_not_a_tick_above() {
    run("
        new 1 sell 100 x1
            accepted 1 100 open 1 rests
        new 2 sell 101 x1
            accepted 2 101 open 1 rests
        new 3 buy 100 x2
            accepted 3 100 open 2
            trade maker 1 taker 3 100 x1 open 0 1
            rested 3 BUY 100 open 1
        depth
            BUY 100 x1
            SELL 101 x1
    ");
}

#[test]
fn r165_sell_matches_down_to_its_price_and_not_a_tick_below() {
    run("
        new 1 buy 100 x1
            accepted 1 100 open 1 rests
        new 2 buy 99 x1
            accepted 2 99 open 1 rests
        new 3 sell 100 x2
            accepted 3 100 open 2
            trade maker 1 taker 3 100 x1 open 0 1
            rested 3 SELL 100 open 1
        depth
            BUY 99 x1
            SELL 100 x1
    ");
}

#[test]
fn r166_trade_quantity_is_the_smaller_remainder() {
    run("
        new 1 sell 100 x10
            accepted 1 100 open 10 rests
        new 2 buy 100 x7
            accepted 2 100 open 7
            trade maker 1 taker 2 100 x7 open 3 0
        new 3 buy 100 x7
            accepted 3 100 open 7
            trade maker 1 taker 3 100 x3 open 0 4
            rested 3 BUY 100 open 4
    ");
}

#[test]
fn r167_trade_price_is_the_resting_orders() {
    run("
        new 1 sell 100 x1
            accepted 1 100 open 1 rests
        new 2 buy 105 x1
            accepted 2 105 open 1
            trade maker 1 taker 2 100 x1 open 0 0
        new 3 buy 105 x1
            accepted 3 105 open 1 rests
        new 4 sell 90 x1
            accepted 4 90 open 1
            trade maker 3 taker 4 105 x1 open 0 0
    ");
}

#[test]
fn r168_both_shrink_and_a_filled_order_is_removed() {
    run("
        new 1 sell 100 x4
            accepted 1 100 open 4 rests
        new 2 sell 100 x4
            accepted 2 100 open 4 rests
        new 3 buy 100 x5
            accepted 3 100 open 5
            trade maker 1 taker 3 100 x4 open 0 1
            trade maker 2 taker 3 100 x1 open 3 0
        depth
            SELL 100 x3
        cancel 1
            cancel-rejected 1 ORDER_NOT_OPEN
        cancel 2
            cancelled 2 USER_REQUEST x3
        depth
    ");
}

#[test]
fn r169_remainder_of_a_limit_order_rests() {
    run("
        new 1 sell 100 x4
            accepted 1 100 open 4 rests
        new 2 buy 102 x10
            accepted 2 102 open 10
            trade maker 1 taker 2 100 x4 open 0 6
            rested 2 BUY 102 open 6
        depth
            BUY 102 x6
    ");
}

#[test]
fn r170_one_order_sweeps_several_levels_in_order() {
    let runner = run("
        new 1 sell 102 x1
            accepted 1 102 open 1 rests
        new 2 sell 101 x1
            accepted 2 101 open 1 rests
        new 3 sell 100 x1
            accepted 3 100 open 1 rests
        new 4 buy 102 x3
            accepted 4 102 open 3
            trade maker 3 taker 4 100 x1 open 0 2
            trade maker 2 taker 4 101 x1 open 0 1
            trade maker 1 taker 4 102 x1 open 0 0
    ");
    assert_eq!(runner.book.trade_number(), 3);
    assert_eq!(runner.book.resting(), 0);
}

#[test]
fn r171_ioc_remainder_is_cancelled_and_never_rests() {
    run("
        new 1 sell 100 x4
            accepted 1 100 open 4 rests
        new 2 buy 100 x10 ioc
            accepted 2 100 open 10
            trade maker 1 taker 2 100 x4 open 0 6
            cancelled 2 IOC_REMAINDER x6
        new 3 buy 100 x10 ioc
            accepted 3 100 open 10
            cancelled 3 IOC_REMAINDER x10
        depth
    ");
}

#[test]
fn r172_fok_all_or_nothing() {
    run("
        new 1 sell 100 x4
            accepted 1 100 open 4 rests
        new 2 sell 101 x5
            accepted 2 101 open 5 rests
        new 3 buy 101 x10 fok
            accepted 3 101 open 10
            cancelled 3 FOK_NOT_FILLABLE x10
        new 4 buy 100 x5 fok
            accepted 4 100 open 5
            cancelled 4 FOK_NOT_FILLABLE x5
        new 5 buy 101 x9 fok
            accepted 5 101 open 9
            trade maker 1 taker 5 100 x4 open 0 5
            trade maker 2 taker 5 101 x5 open 0 0
        depth
    ");
}

// rows: R173 R328
#[test]
fn r173_market_consumes_best_prices_and_never_rests() {
    run("
        new 1 sell 100 x4
            accepted 1 100 open 4 rests
        new 2 sell 110 x4
            accepted 2 110 open 4 rests
        new 3 buy market x10 at:105
            accepted 3 105 open 10
            trade maker 1 taker 3 100 x4 open 0 6
            cancelled 3 IOC_REMAINDER x6
        new 4 buy market x5 at:115 fok
            accepted 4 115 open 5
            cancelled 4 FOK_NOT_FILLABLE x5
        new 5 sell market x1
            accepted 5 1 open 1
            cancelled 5 NO_LIQUIDITY x1
        new 6 buy market x1 at:0
            accepted 6 0 open 1
            cancelled 6 NO_LIQUIDITY x1
        new 7 sell market x1 fok
            accepted 7 1 open 1
            cancelled 7 NO_LIQUIDITY x1
        depth
            SELL 110 x4
    ");
}

// rows: R173
#[test]
fn r173_t19_a_protection_short_of_the_band_holds() {
    // The band has moved away from a resting order: a market order's own price, below the band, may
    // match it and nothing more expensive.
    run("
        band 70 110
        new 1 sell 80 x2
            accepted 1 80 open 2 rests
        new 2 sell 90 x2
            accepted 2 90 open 2 rests
        band 90 110
        new 3 buy market x5 at:85
            accepted 3 85 open 5
            trade maker 1 taker 3 80 x2 open 0 3
            cancelled 3 IOC_REMAINDER x3
        new 4 buy market x5 at:79
            accepted 4 79 open 5
            cancelled 4 NO_LIQUIDITY x5
        depth
            SELL 90 x2
    ");
}

/// Admission never passes a market order with a price beyond the band's far limit.
#[test]
#[should_panic(expected = "protection price by the band's far limit")]
fn t19_a_protection_price_beyond_the_band_is_our_bug() {
    run("
        band 90 110
        new 1 buy market x1 at:111
    ");
}

// Slots are shared by the whole node: in a book with few orders at high slots, a mass cancel finds
// them by price. The order of the cancels is the same.
#[test]
fn a_mass_cancel_runs_in_slot_order_in_a_sparse_book() {
    run("
        new 9000 buy 99 x1
            accepted 9000 99 open 1 rests
        new 20 sell 105 x1
            accepted 20 105 open 1 rests
        new 4000 buy 98 x1
            accepted 4000 98 open 1 rests
        new 3 buy 99 x1
            accepted 3 99 open 1 rests
        mass all
            cancelled 3 MASS_CANCEL x1
            cancelled 20 MASS_CANCEL x1
            cancelled 4000 MASS_CANCEL x1
            cancelled 9000 MASS_CANCEL x1
    ");
}

// rows: R177
#[test]
fn r177_depth_is_summed_by_price_and_best_first() {
    run("
        new 1 buy 99 x2
            accepted 1 99 open 2 rests
        new 2 buy 100 x3
            accepted 2 100 open 3 rests
        new 3 buy 99 x5
            accepted 3 99 open 5 rests
        new 4 sell 103 x1
            accepted 4 103 open 1 rests
        new 5 sell 102 x4
            accepted 5 102 open 4 rests
        depth
            BUY 100 x3
            BUY 99 x7
            SELL 102 x4
            SELL 103 x1
    ");
}

// rows: R143
#[test]
fn t22_less_quantity_keeps_the_place_more_or_another_price_loses_it() {
    run("
        new 1 buy 100 x10
            accepted 1 100 open 10 rests
        new 2 buy 100 x10
            accepted 2 100 open 10 rests
        amend 1 qty:6
            amended 1 100 x6 open 6 kept
        new 3 sell 100 x2
            accepted 3 100 open 2
            trade maker 1 taker 3 100 x2 open 4 0
        amend 1 qty:8
            amended 1 100 x8 open 6 lost
            rested 1 BUY 100 open 6
        new 4 sell 100 x1
            accepted 4 100 open 1
            trade maker 2 taker 4 100 x1 open 9 0
        amend 2 price:101
            amended 2 101 x10 open 9 lost
            rested 2 BUY 101 open 9
        amend 1 qty:2
            amend-rejected 1 INVALID_AMEND open 6
        amend 1 price:1001
            amend-rejected 1 PRICE_BAND open 6
        amend 9 qty:1
            amend-rejected 9 ORDER_NOT_OPEN open 0
        depth
            BUY 101 x9
            BUY 100 x6
    ");
}

#[test]
fn t22_outside_the_band_an_order_may_only_shrink() {
    run("
        new 1 buy 100 x10
            accepted 1 100 open 10 rests
        band 200 300
        amend 1 qty:11
            amend-rejected 1 PRICE_BAND open 10
        amend 1 price:101
            amend-rejected 1 PRICE_BAND open 10
        amend 1 price:100 qty:8
            amended 1 100 x8 open 8 kept
        amend 1 qty:6
            amended 1 100 x6 open 6 kept
        amend 1 price:200 qty:20
            amended 1 200 x20 open 20 lost
            rested 1 BUY 200 open 20
        amend 1 qty:21
            amended 1 200 x21 open 21 lost
            rested 1 BUY 200 open 21
    ");
}

#[test]
fn t22_an_amend_that_crosses_trades() {
    run("
        new 1 sell 105 x3
            accepted 1 105 open 3 rests
        new 2 buy 100 x10
            accepted 2 100 open 10 rests
        amend 2 price:105
            amended 2 105 x10 open 10 lost
            trade maker 1 taker 2 105 x3 open 0 7
            rested 2 BUY 105 open 7
    ");
}

#[test]
fn post_only_rests_or_is_rejected() {
    run("
        new 1 sell 100 x1
            accepted 1 100 open 1 rests
        new 2 buy 100 x1 post
            rejected 2 POST_ONLY
        new 2 buy 99 x1 post
            accepted 2 99 open 1 rests
        amend 2 price:100
            amend-rejected 2 POST_ONLY open 1
        new 3 buy 99 x1 post ioc
            rejected 3 INVALID_COMBINATION
    ");
}

#[test]
fn d35_band_tick_and_quantity_limits() {
    run("
        new 1 buy 1001 x1
            rejected 1 PRICE_BAND
        new 1 buy 0 x1
            rejected 1 PRICE_TICK
        new 1 buy 100 x0
            rejected 1 QUANTITY_LOT
        new 1 buy 1000 x1
            accepted 1 1000 open 1 rests
    ");
}

#[test]
fn d38_cancel_newest_is_the_default() {
    run("
        new 1 sell 100 x5 user:7
            accepted 1 100 open 5 rests
        new 2 sell 99 x2
            accepted 2 99 open 2 rests
        new 3 buy 100 x5 user:7
            accepted 3 100 open 5
            trade maker 2 taker 3 99 x2 open 0 3
            cancelled 3 SELF_TRADE x3
        new 4 buy 100 x5 fok user:7
            accepted 4 100 open 5
            cancelled 4 FOK_NOT_FILLABLE x5
        depth
            SELL 100 x5
    ");
}

#[test]
fn d38_cancel_oldest_continues_matching() {
    run("
        new 1 sell 100 x5 user:7
            accepted 1 100 open 5 rests
        new 2 sell 100 x2
            accepted 2 100 open 2 rests
        new 3 buy 100 x3 fok user:7 stp:CANCEL_OLDEST
            accepted 3 100 open 3
            cancelled 3 FOK_NOT_FILLABLE x3
        new 4 buy 100 x5 user:7 stp:CANCEL_OLDEST
            accepted 4 100 open 5
            cancelled 1 SELF_TRADE x5
            trade maker 2 taker 4 100 x2 open 0 3
            rested 4 BUY 100 open 3
    ");
}

#[test]
fn d38_cancel_both() {
    run("
        new 1 sell 100 x5 user:7
            accepted 1 100 open 5 rests
        new 2 buy 100 x9 user:7 stp:CANCEL_BOTH
            accepted 2 100 open 9
            cancelled 1 SELF_TRADE x5
            cancelled 2 SELF_TRADE x9
        depth
    ");
}

#[test]
fn d38_decrement_shrinks_both() {
    run("
        new 1 sell 100 x5 user:7
            accepted 1 100 open 5 rests
        new 2 buy 100 x9 user:7 stp:DECREMENT
            accepted 2 100 open 9
            cancelled 1 SELF_TRADE x5
            reduced 2 SELF_TRADE x5 open 4
            rested 2 BUY 100 open 4
        new 3 sell 100 x1 user:7 stp:DECREMENT
            accepted 3 100 open 1
            reduced 2 SELF_TRADE x1 open 3
            cancelled 3 SELF_TRADE x1
        amend 2 qty:3
            amended 2 100 x3 open 3 kept
        new 4 sell 100 x3 user:7 stp:DECREMENT
            accepted 4 100 open 3
            cancelled 2 SELF_TRADE x3
            cancelled 4 SELF_TRADE x3
        depth
    ");
}

/// Level sums may suffice where the group's own orders prevent the fill.
#[test]
fn d38_fok_counts_only_other_groups_orders_within_its_limit() {
    run("
        new 1 sell 100 x5
            accepted 1 100 open 5 rests
        new 2 sell 101 x5 user:7
            accepted 2 101 open 5 rests
        new 3 sell 102 x5
            accepted 3 102 open 5 rests
        new 4 buy 102 x16 fok user:7 stp:NONE
            accepted 4 102 open 16
            cancelled 4 FOK_NOT_FILLABLE x16
        new 5 buy 101 x11 fok
            accepted 5 101 open 11
            cancelled 5 FOK_NOT_FILLABLE x11
        new 6 buy 102 x11 fok user:7 stp:CANCEL_OLDEST
            accepted 6 102 open 11
            cancelled 6 FOK_NOT_FILLABLE x11
        new 7 buy 102 x6 fok user:7 stp:DECREMENT
            accepted 7 102 open 6
            cancelled 7 FOK_NOT_FILLABLE x6
        new 8 buy 102 x5 fok user:7
            accepted 8 102 open 5
            trade maker 1 taker 8 100 x5 open 0 0
        new 9 buy 102 x5 fok user:7 stp:CANCEL_OLDEST
            accepted 9 102 open 5
            cancelled 2 SELF_TRADE x5
            trade maker 3 taker 9 102 x5 open 0 0
        depth
    ");
}

#[test]
fn d38_off_by_setting_and_by_group() {
    run("
        new 1 sell 100 x5 user:7
            accepted 1 100 open 5 rests
        new 2 buy 100 x1 user:7 stp:NONE
            accepted 2 100 open 1
            trade maker 1 taker 2 100 x1 open 4 0
        new 3 sell 99 x1 user:8 group:1
            accepted 3 99 open 1 rests
        new 4 buy 99 x1 user:9 group:1
            accepted 4 99 open 1
            cancelled 4 SELF_TRADE x1
    ");
}

#[test]
fn gtd_expires_by_the_journalled_time_before_it_can_match() {
    run("
        new 1 sell 100 x5 gtd:50000
            accepted 1 100 open 5 rests
        new 2 sell 100 x5 gtd:60000
            accepted 2 100 open 5 rests
        expire
        time 49000
        new 3 buy 100 x6
            cancelled 1 EXPIRED x5
            accepted 3 100 open 6
            trade maker 2 taker 3 100 x5 open 0 1
            rested 3 BUY 100 open 1
        new 4 buy 100 x6 gtd:50000
            rejected 4 EXPIRED
        new 4 buy 100 x6 gtd:70000
            accepted 4 100 open 6 rests
        time 69000
        expire
            cancelled 4 EXPIRED x6
        depth
            BUY 100 x1
    ");
}

#[test]
fn orders_due_together_expire_by_date_then_by_slot() {
    run("
        new 7 sell 100 x5 gtd:60000
            accepted 7 100 open 5 rests
        new 2 sell 101 x5 gtd:60000
            accepted 2 101 open 5 rests
        new 5 buy 90 x5 gtd:50000
            accepted 5 90 open 5 rests
        new 3 buy 90 x5 gtd:70000
            accepted 3 90 open 5 rests
        new 4 buy 90 x5 gtd:40000
            accepted 4 90 open 5 rests
        cancel 4
            cancelled 4 USER_REQUEST x5
        amend 3 price:91
            amended 3 91 x5 open 5 lost
            rested 3 BUY 91 open 5
        time 41000
        expire
        time 64000
        new 9 buy 80 x1
            cancelled 5 EXPIRED x5
            cancelled 2 EXPIRED x5
            cancelled 7 EXPIRED x5
            accepted 9 80 open 1 rests
        time 70000
        expire
            cancelled 3 EXPIRED x5
        depth
            BUY 80 x1
    ");
}

#[test]
fn d14_mass_cancel_walks_in_slot_order() {
    run("
        new 9 buy 100 x1 user:1
            accepted 9 100 open 1 rests
        new 2 buy 99 x1 user:1
            accepted 2 99 open 1 rests
        new 5 sell 110 x1 user:1 session:8
            accepted 5 110 open 1 rests
        new 6 sell 111 x1 user:2 group:4
            accepted 6 111 open 1 rests
        mass user:1 buy
            cancelled 2 MASS_CANCEL x1
            cancelled 9 MASS_CANCEL x1
        mass user:2 buy USER_BLOCKED
        mass session:8 CANCEL_ON_DISCONNECT
            cancelled 5 CANCEL_ON_DISCONNECT x1
        mass group:4 here
            cancelled 6 MASS_CANCEL x1
        new 1 buy 100 x1
            accepted 1 100 open 1 rests
        mass all KILL_SWITCH
            cancelled 1 KILL_SWITCH x1
    ");
}

#[test]
fn phases_gate_what_enters() {
    run("
        phase PRE_OPEN
            phase PRE_OPEN
        new 1 sell 100 x1
            accepted 1 100 open 1 rests
        new 2 buy 100 x1
            rejected 2 INSTRUMENT_PRE_OPEN
        new 2 buy 99 x1 ioc
            rejected 2 INSTRUMENT_PRE_OPEN
        phase OPEN
            phase OPEN
        phase HALT
            phase HALT
        new 2 buy 99 x1
            rejected 2 INSTRUMENT_HALTED
        amend 1 qty:2
            amend-rejected 1 INSTRUMENT_HALTED open 1
        cancel 1
            cancelled 1 USER_REQUEST x1
        phase OPEN
            phase OPEN
        new 3 sell 100 x1
            accepted 3 100 open 1 rests
        phase HALT cancel
            phase HALT
            cancelled 3 INSTRUMENT_HALTED x1
        phase CLOSED
            phase CLOSED
        new 4 sell 100 x1
            rejected 4 INSTRUMENT_CLOSED
        phase OPEN
            phase OPEN
        new 4 sell 100 x1
            accepted 4 100 open 1 rests
        phase MATURED
            phase MATURED
            cancelled 4 INSTRUMENT_MATURED x1
        new 5 sell 100 x1
            rejected 5 INSTRUMENT_MATURED
    ");
}

#[test]
#[should_panic(expected = "slot was reused")]
fn a_foreign_generation_in_a_live_slot_is_our_bug() {
    let runner = run("
        new 1 sell 100 x1
            accepted 1 100 open 1 rests
    ");
    let wrong = types::Handle {
        slot: 1,
        generation: 2,
    };
    runner.book.is_resting(wrong);
    runner.book.order(wrong);
}

/// A book that halts when trades move more than 5 % from the reference within a millisecond.
fn with_velocity() -> engine::Book {
    let velocity = types::VelocityRule {
        width_ppm: 50_000,
        window_ms: 1,
    };
    small_book(spec_with(1, 1_000, velocity))
}

#[test]
fn f08_a_trade_that_would_go_too_far_halts_the_market_instead() {
    run_on(
        with_velocity(),
        "
        new 1 sell 100 x1
            accepted 1 100 open 1 rests
        new 2 sell 105 x1
            accepted 2 105 open 1 rests
        new 3 sell 106 x1
            accepted 3 106 open 1 rests
        new 4 buy 110 x9 fok
            accepted 4 110 open 9
            cancelled 4 FOK_NOT_FILLABLE x9
        new 5 buy 110 x3 fok stp:NONE
            accepted 5 110 open 3
            cancelled 5 FOK_NOT_FILLABLE x3
        new 6 buy 110 x3
            accepted 6 110 open 3
            trade maker 1 taker 6 100 x1 open 0 2
            trade maker 2 taker 6 105 x1 open 0 1
            cancelled 6 INSTRUMENT_HALTED x1
            phase HALT VELOCITY
        depth
            SELL 106 x1
        new 7 buy 100 x1
            rejected 7 INSTRUMENT_HALTED
        amend 3 qty:1
            amend-rejected 3 INSTRUMENT_HALTED open 1
        band 1 900
            phase HALT
        cancel 3
            cancelled 3 USER_REQUEST x1
        phase OPEN
            phase OPEN
        new 8 sell 300 x1
            accepted 8 300 open 1 rests
        new 9 buy 300 x1 ioc
            accepted 9 300 open 1
            trade maker 8 taker 9 300 x1 open 0 0
    ",
    );
}

#[test]
fn f08_each_window_measures_from_the_last_price_before_it() {
    run_on(
        with_velocity(),
        "
        new 1 buy 100 x1
            accepted 1 100 open 1 rests
        new 2 sell 100 x1
            accepted 2 100 open 1
            trade maker 1 taker 2 100 x1 open 0 0
        new 3 buy 96 x1
            accepted 3 96 open 1 rests
        new 4 sell 96 x1
            accepted 4 96 open 1
            trade maker 3 taker 4 96 x1 open 0 0
        new 5 buy 92 x2
            accepted 5 92 open 2 rests
        time 1001000
        new 6 sell 92 x1
            accepted 6 92 open 1
            trade maker 5 taker 6 92 x1 open 1 0
        new 7 buy 91 x1
            accepted 7 91 open 1 rests
        new 8 sell 200 x1
            accepted 8 200 open 1 rests
        amend 8 price:91
            amended 8 91 x1 open 1 lost
            trade maker 5 taker 8 92 x1 open 0 0
        new 9 sell 200 x1
            accepted 9 200 open 1 rests
        amend 9 price:91
            amended 9 91 x1 open 1 lost
            cancelled 9 INSTRUMENT_HALTED x1
            phase HALT VELOCITY
        depth
            BUY 91 x1
    ",
    );
}
