//! Requests that are accepted before the end of a shutdown are answered and reported.

use types::Side;
use wire::ServerMessage;

use crate::world::*;

#[tokio::test]
async fn an_accepted_call_is_answered_after_the_shutdown() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    // Listeners drain after the token is cancelled: a call that is admitted meanwhile is answered.
    world.begin_shutdown();
    let order = world.place(buy("ann", "10", "1")).await.unwrap();
    assert_eq!(
        world.order(&order.order_id).await.unwrap().order_id,
        order.order_id
    );
    world.stop().await;
}

#[tokio::test]
async fn session_receives_reports_of_requests_accepted_before_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    let (connection, mut reports) = world.session(with_money("ann", "a")).await;
    for id in 1..=40 {
        let order = wire_order(id, Side::Buy, 1_000, 1);
        connection.send(0, order).await.unwrap();
    }
    let (mut accepted, mut acknowledged) = (0, 0);
    let stopping = async {
        world.stop().await;
    };
    let reading = async {
        while let Some(Ok(report)) = reports.recv().await {
            match report.message {
                ServerMessage::Accepted(_) => accepted += 1,
                ServerMessage::OrderAck(_) => acknowledged += 1,
                _ => {}
            }
        }
    };
    let both = async { tokio::join!(stopping, reading) };
    in_time("the shutdown, and the end of the reports", both).await;
    assert_eq!(acknowledged, accepted);
}
