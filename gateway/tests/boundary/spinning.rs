//! The spinning client with the front. It follows the same rules as the async client.

use std::time::Instant;

use client::spinning::Connection;
use client::{Error, LoginOptions, Report, Trust};
use testkit::PATIENCE;
use types::Side;
use wire::{DisconnectCode, ServerMessage};

use crate::world::*;

/// Polls until `pick` returns a value for a report.
fn until<T>(connection: &mut Connection, pick: impl Fn(&Report) -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        while let Some(report) = connection.recv() {
            if let Some(found) = pick(&report) {
                return found;
            }
        }
        assert!(begun.elapsed() < PATIENCE, "the report does not arrive");
        connection.poll().expect("the connection is open");
    }
}

fn next_numbered(connection: &mut Connection) -> Report {
    until(connection, |report| {
        (report.sequence != 0).then_some(*report)
    })
}

fn order(id: u64, side: Side, lots: u64) -> wire::ClientMessage {
    wire_order(id, side, 1_000, lots).into()
}

/// Two members trade on one connection, which is lost before an order is transmitted.
fn trade_and_resume(address: std::net::SocketAddr, trust: &Trust) {
    let mut connection = Connection::connect(address, trust).unwrap();
    connection.login(0, with_money("ann", "a")).unwrap();
    connection.login(1, login("bob", "b")).unwrap();
    let known: Vec<_> = connection.instruments().collect();
    assert_eq!(known[0].id.as_str(), BOND);
    let refused = connection.login(2, LoginOptions::new("wrong", "c"));
    let Err(Error::Disconnected { code, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(code, Some(DisconnectCode::Credentials));

    assert_eq!(
        connection.send(0, &order(1, Side::Buy, 10)).unwrap(),
        Some(1)
    );
    let first = next_numbered(&mut connection);
    let ServerMessage::OrderAck(ack) = first.message else {
        panic!("{first:?}");
    };
    assert_eq!((first.channel, first.sequence, ack.client_seq), (0, 1, 1));

    // Not transmitted: the server sees this order only after the resume.
    assert_eq!(
        connection.send(1, &order(1, Side::Sell, 4)).unwrap(),
        Some(1)
    );
    connection.cut();
    assert!(connection.poll().is_err());
    let refused = connection.send(1, &order(2, Side::Sell, 1));
    assert!(matches!(refused, Err(Error::NotLoggedIn)));
    let infos = connection.resume().unwrap();
    let seen: Vec<_> = infos
        .iter()
        .map(|(channel, info)| (*channel, info.next_sequence))
        .collect();
    assert_eq!(seen, [(0, 2), (1, 1)]);
    assert_eq!(
        connection.send(1, &order(2, Side::Sell, 1)).unwrap(),
        Some(2)
    );
    let mut lots = Vec::new();
    while lots.len() < 2 {
        let report = next_numbered(&mut connection);
        match report.message {
            ServerMessage::Fill(fill) if report.channel == 0 => {
                lots.push((report.sequence, fill.quantity_lots));
            }
            _ => {}
        }
    }
    // Message 2 reports that the second login has topped up the trading hold.
    assert_eq!(lots, [(3, 4), (4, 1)]);
    assert_eq!(connection.last_sequence(0), 4);
}

// rows: R343
#[tokio::test]
async fn r343_a_spinning_client_trades_and_resumes_without_gap_or_duplicate() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::with(folder.path(), Settings::unsettled()).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "1000").await;
    world.open_hold("bob", BOND, "1000").await;
    let address = world.gateway.trading_address();
    let trust: Trust = world.gateway.fingerprint().parse().unwrap();
    let trading = tokio::task::spawn_blocking(move || trade_and_resume(address, &trust));
    trading.await.unwrap();
    world.stop().await;
}
