//! A member on tokio: logs in, places an order, waits until it is durable, cancels it.
//!
//! `cargo run -p client --example async -- [TOKEN] [ADDRESS]`, against a platform on this machine
//! with an open market. The user of the token may trade and owns 100 CFA-RUB, like Anna of the
//! README.

use std::net::SocketAddr;

use client::{Connection, LoginOptions, Reports, Trust, reject_text};
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

/// Places an order, waits until it is durable, and cancels it. Returns its public id.
pub async fn trade(gateway: SocketAddr, token: &str) -> Result<String, Failure> {
    // `Loopback` accepts any certificate of a server on this machine. For a remote server pin the
    // fingerprint that the platform prints: `fingerprint.parse::<Trust>()`.
    let (connection, mut reports) = Connection::connect(gateway, Trust::Loopback).await?;
    let options = LoginOptions {
        // An order draws on the trading hold: 100.00 CFA-RUB.
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

    // `send` does not wait for the answer. The answer carries the returned client sequence.
    let price = market.band_low_ticks.max(1);
    let order = NewOrder::limit(1, market.instrument, Side::Buy, price, 1);
    let sequence = connection.send(CHANNEL, order).await?;
    let ServerMessage::OrderAck(ack) = answer(&mut reports, sequence).await? else {
        return Err("expected OrderAck as the first answer to the order".into());
    };
    // The order is durable and in the book.
    let cancel = Cancel {
        client_order_id: 1,
        engine_order_id: 0,
    };
    let sequence = connection.send(CHANNEL, cancel).await?;
    answer(&mut reports, sequence).await?;
    Ok(ack.order_id.to_string())
}

/// Waits for the final answer to a request. After an error of `recv` the connection is lost, and
/// `connection.resume()` continues without a gap.
async fn answer(reports: &mut Reports, sequence: u64) -> Result<ServerMessage, Failure> {
    loop {
        let report = reports.recv().await.ok_or("the connection is closed")??;
        match report.message {
            ServerMessage::Rejected(no) if no.client_seq == sequence => {
                return Err(reject_text(&no).into());
            }
            message if message.answers() == sequence => return Ok(message),
            // For example the hint `Accepted`, a heartbeat or an instrument.
            _ => {}
        }
    }
}
