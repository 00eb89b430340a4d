//! A member on tokio: logs in, places an order, waits until it is durable, cancels it.
//!
//! `cargo run -p client --example async -- [TOKEN] [ADDRESS]`, against a platform on this machine
//! with an open market. The user of the token may trade and owns 100 CFA-RUB, like Anna of the
//! README.

use std::net::SocketAddr;

use client::{Connection, LoginOptions, Reports, Trust, in_words};
use types::{Phase, Side};
use wire::{Cancel, NewOrder, ServerMessage};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Up to 64 sessions share a connection, each on its own channel.
const CHANNEL: u16 = 0;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let token = args.next();
    let gateway = args.next();
    let token = token.as_deref().unwrap_or("sandbox.trader.anna");
    let gateway = gateway.as_deref().unwrap_or("127.0.0.1:8090");
    println!("{}", trade(gateway.parse()?, token).await?);
    Ok(())
}

/// Returns the public id of the order.
pub async fn trade(gateway: SocketAddr, token: &str) -> Result<String, Failure> {
    // Any certificate is accepted on this machine. Elsewhere pin the fingerprint that the platform
    // prints: `fingerprint.parse::<Trust>()`.
    let (connection, mut reports) = Connection::connect(gateway, Trust::Loopback).await?;
    let options = LoginOptions {
        // Money must be on hold before an order can draw on it: 100.00.
        money_hold_minor: 10_000,
        // Skip messages of an earlier run.
        from_now: true,
        cancel_on_disconnect: true,
        ..LoginOptions::new(token, "example-async")
    };
    connection.login(CHANNEL, options).await?;
    let known = connection.instruments();
    let open = known.iter().find(|one| one.phase == Phase::Open);
    let market = open.ok_or("no instrument is open for trading")?;

    // `send` does not wait for an answer; the answer carries the client sequence that it returns.
    let price = market.band_low_ticks.max(1);
    let order = NewOrder::limit(1, market.instrument, Side::Buy, price, 1);
    let sequence = connection.send(CHANNEL, order).await?;
    let ServerMessage::OrderAck(ack) = answer(&mut reports, sequence).await? else {
        return Err("expected OrderAck as the first answer to the order".into());
    };
    // The order is now on disk and in the book.
    let cancel = Cancel {
        client_order_id: 1,
        engine_order_id: 0,
    };
    let sequence = connection.send(CHANNEL, cancel).await?;
    answer(&mut reports, sequence).await?;
    Ok(ack.order_id.to_string())
}

/// Waits for the final answer to a request. An error of `recv` means that the connection is lost:
/// `connection.resume()` continues without a gap.
async fn answer(reports: &mut Reports, sequence: u64) -> Result<ServerMessage, Failure> {
    loop {
        let report = reports.recv().await.ok_or("the connection is closed")??;
        match report.message {
            ServerMessage::Rejected(no) if no.client_seq == sequence => {
                return Err(in_words(&no).into());
            }
            message if message.answers() == sequence => return Ok(message),
            // The hint `Accepted`, heartbeats, instruments.
            _ => {}
        }
    }
}
