//! The health report of a clock that stepped, and its recovery.

use std::sync::Arc;

use ledger::Clock;
use service_kit::clock::{Disciplined, Time};
use testkit::Machine;

use crate::harness::{RUB, START_US, World, eventually};

const DAY_S: i64 = 86_400;

fn clock_of(process: &Arc<Disciplined>) -> Clock {
    Clock::Custom(process.clone())
}

fn trouble(world: &World) -> Option<String> {
    let failing = world.handle.service().health.failing();
    failing.get("clock").cloned()
}

/// A ledger that has written while the machine's clock was a day ahead. The clock has since been
/// corrected.
async fn after_a_jump() -> (Machine, Arc<Disciplined>, World) {
    let machine = Machine::at(START_US.unsigned_abs() * 1_000);
    machine.set_wrong_by_s(DAY_S);
    let world = World::with_clock(clock_of(&machine.process())).await;
    world.fund("u1", RUB, "1").await;
    assert_eq!(trouble(&world), None);
    machine.set_wrong_by_s(0);
    let process = machine.process();
    let world = world.restart_by(clock_of(&process)).await;
    (machine, process, world)
}

// Regression: health failed for as long as the clock had been ahead, and no call could confirm the
// clock.
#[tokio::test]
async fn a_clock_behind_the_last_write_is_reported_until_it_is_confirmed() {
    let (machine, process, world) = after_a_jump().await;
    let reason = eventually(async || trouble(&world)).await;
    assert!(reason.contains("86400 s behind"), "{reason}");
    assert!(
        reason.contains("confirm-clock --offset-seconds -86400"),
        "{reason}"
    );
    world.fund("u1", RUB, "1").await;
    assert!(trouble(&world).is_some(), "a write does not clear it");

    process.confirm().expect("something to confirm");
    eventually(async || trouble(&world).is_none().then_some(())).await;
    world.fund("u1", RUB, "1").await;
    machine.pass_ms(1_000);
    process.observe();
    assert!(
        process.state().suspect_ns().is_none(),
        "the confirmed clock is not suspect, although ledger time does not advance"
    );
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "3.00");
}

#[tokio::test]
async fn a_clock_set_past_the_last_write_recovers_by_itself() {
    let (machine, process, world) = after_a_jump().await;
    eventually(async || trouble(&world)).await;
    machine.set_wrong_by_s(2 * DAY_S);
    process.observe();
    eventually(async || trouble(&world).is_none().then_some(())).await;
}
