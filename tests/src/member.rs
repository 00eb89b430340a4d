//! A trading session over the binary protocol.

use std::time::Duration;

use client::{Connection, LoginOptions, Report, Reports, Trust};
use types::Side;
use wire::{NewOrder, ServerMessage};

use crate::Platform;
use crate::process::PATIENCE;
use crate::world::User;

/// A connection with one session on channel 0.
pub struct Terminal {
    pub connection: Connection,
    pub reports: Reports,
    pub instrument: u32,
}

/// A limit order in ticks of a kopeck and whole lots.
pub fn limit(
    id: u64,
    instrument: u32,
    side: Side,
    price_ticks: i64,
    quantity_lots: u64,
) -> NewOrder {
    NewOrder::limit(id, instrument, side, price_ticks, quantity_lots)
}

/// The protocol's number of an instrument.
pub fn instrument_of(connection: &Connection, id: &str) -> u32 {
    let all = connection.instruments();
    let found = all.iter().find(|definition| definition.id.as_str() == id);
    found
        .unwrap_or_else(|| panic!("the gateway has no instrument {id}"))
        .instrument
}

impl Terminal {
    /// Connects and logs in.
    pub async fn open(platform: &Platform, user: &User, instrument: &str) -> Self {
        let (connection, reports) =
            Connection::connect(platform.address("trading"), Trust::Loopback)
                .await
                .expect("a connection");
        connection
            .login(0, LoginOptions::new(&user.token(), "terminal"))
            .await
            .expect("a login");
        let instrument = instrument_of(&connection, instrument);
        Self {
            connection,
            reports,
            instrument,
        }
    }

    /// Sends a limit order; does not wait for its answer.
    pub async fn place(&self, id: u64, side: Side, price_ticks: i64, quantity_lots: u64) {
        let order = limit(id, self.instrument, side, price_ticks, quantity_lots);
        self.connection.send(0, order).await.expect("sent");
    }

    /// Waits for the next report that `pick` accepts; returns what `pick` made of it.
    ///
    /// # Panics
    /// If none arrives within a minute.
    pub async fn expect<T>(&mut self, what: &str, pick: impl Fn(&ServerMessage) -> Option<T>) -> T {
        let wait = async {
            loop {
                let Report { message, .. } = self
                    .reports
                    .recv()
                    .await
                    .expect("the connection is open")
                    .expect("a report");
                if let Some(found) = pick(&message) {
                    return found;
                }
            }
        };
        tokio::time::timeout(PATIENCE, wait)
            .await
            .unwrap_or_else(|_| panic!("timed out waiting for {what}"))
    }

    /// Places an order and waits until it is durable; returns its public id.
    pub async fn acknowledged(
        &mut self,
        id: u64,
        side: Side,
        price_ticks: i64,
        quantity_lots: u64,
    ) -> String {
        self.place(id, side, price_ticks, quantity_lots).await;
        self.expect("the acknowledgement", |message| match message {
            ServerMessage::OrderAck(ack) if ack.client_order_id == id => {
                Some(ack.order_id.to_string())
            }
            ServerMessage::Rejected(rejected) if rejected.client_order_id == id => {
                panic!("order rejected: {}", rejected.reason.as_str())
            }
            _ => None,
        })
        .await
    }
}

/// Resumes a connection whose server is restarting; retries until it succeeds.
///
/// # Panics
/// If it does not succeed within a minute.
pub async fn resume(connection: &Connection) {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        match connection.resume().await {
            Ok(_) => return,
            Err(error) => {
                assert!(
                    std::time::Instant::now() < deadline,
                    "the sessions cannot be resumed: {error}"
                );
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}
