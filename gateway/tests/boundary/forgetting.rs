//! Closed sessions are forgotten after the retention (`design.md` 2).

use client::{Error, LoginOptions};
use types::{Id128, Side, UserId, derived};
use wire::{DisconnectCode, ServerMessage};

use crate::checkpoints::cancel_own;
use crate::world::*;

/// Number of the user's sessions in the replica, and whether the named session is one of them.
pub fn replica_sessions(world: &World, user_id: &str, name: &str) -> (u32, bool) {
    let id = UserId::new(user_id).unwrap();
    let key: Id128 = derived::session_key(user_id, name);
    world.replica().read(|state| {
        let admission = state.core().admission();
        let user = admission.user_ix(&id).and_then(|ix| admission.user(ix));
        let sessions = user.map_or(0, |user| user.sessions);
        (sessions, admission.session_ix(key).is_some())
    })
}

/// Code of a refused login.
async fn refusal(world: &World, options: LoginOptions) -> Option<DisconnectCode> {
    let (connection, _reports) = world.connect().await;
    match in_time("an answer", connection.login(0, options)).await {
        Err(Error::Disconnected { code, .. }) => code,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_closed_session_is_forgotten_and_its_name_starts_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let settings = || {
        let mut settings = Settings::default();
        settings.gateway.session_retention_s = 1;
        settings.gateway.sweep_interval_ms = 20;
        settings.gateway.sessions_per_user_max = 2;
        settings
    };
    let mut world = World::with(folder.path(), settings()).await;
    world.user("ann", "100000", "0").await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    ann.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    let is_ack = |message: &ServerMessage| match message {
        ServerMessage::OrderAck(ack) => Some(ack.client_order_id),
        _ => None,
    };
    assert_eq!(until(&mut of_ann, is_ack).await, 1);
    let (other, mut of_other) = world.session(login("ann", "b")).await;
    cut(&ann, &mut of_ann).await;
    cut(&other, &mut of_other).await;
    // The session without open orders is forgotten. The other one stays, also after a restart.
    let is_gone = async || replica_sessions(&world, "ann", "b") == (1, false);
    until_true("session b is forgotten", is_gone).await;
    let world = world.restart(settings()).await;
    let is_known = async || replica_sessions(&world, "ann", "a") == (1, true);
    until_true("the replica has caught up", is_known).await;
    let (ann, mut of_ann) = world.session(login("ann", "a")).await;
    ann.send(0, cancel_own(1)).await.unwrap();
    let is_cancelled = |message: &ServerMessage| match message {
        ServerMessage::Cancelled(cancelled) => Some(cancelled.client_order_id),
        _ => None,
    };
    assert_eq!(until(&mut of_ann, is_cancelled).await, 1);
    let _open = world.session(login("ann", "c")).await;
    let code = refusal(&world, login("ann", "d")).await;
    assert_eq!(code, Some(DisconnectCode::TooManySessions));
    cut(&ann, &mut of_ann).await;
    let is_gone = async || replica_sessions(&world, "ann", "a") == (1, false);
    until_true("session a is forgotten", is_gone).await;
    // A login that resumes the forgotten session is refused.
    let resumed = LoginOptions {
        last_sequence: 2,
        ..login("ann", "a")
    };
    let code = refusal(&world, resumed).await;
    assert_eq!(code, Some(DisconnectCode::SequenceAhead));
    let (ann, mut of_ann) = world.session(login("ann", "a")).await;
    ann.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    let report = next_numbered(&mut of_ann).await;
    assert_eq!((report.sequence, is_ack(&report.message)), (1, Some(1)));
    world.stop().await;
}
