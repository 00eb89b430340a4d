//! The trades of `async.rs` on a polling thread, for a member that dedicates a core to latency.
//!
//! `cargo run --release -p client --example spinning -- [TOKEN] [ADDRESS]`

use std::net::SocketAddr;

use client::spinning::Connection;
use client::{LoginOptions, Trust, reject_text};
use types::{Phase, Side};
use wire::{Cancel, NewOrder, ServerMessage};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const CHANNEL: u16 = 0;

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let token = args.next();
    let gateway = args.next();
    let token = token.as_deref().unwrap_or("sandbox.trader.anna");
    let gateway = gateway.as_deref().unwrap_or("127.0.0.1:8090");
    println!("{}", trade(gateway.parse()?, token)?);
    Ok(())
}

/// Places an order, polls until it is durable, and cancels it. Returns its public id.
pub fn trade(gateway: SocketAddr, token: &str) -> Result<String, Failure> {
    // `connect` and `login` poll until they are answered: pin the thread to its core first.
    let mut connection = Connection::connect(gateway, &Trust::Loopback)?;
    let options = LoginOptions {
        money_hold_minor: 10_000,
        from_now: true,
        cancel_on_disconnect: true,
        ..LoginOptions::new(token, "example-spinning")
    };
    connection.login(CHANNEL, options)?;
    let mut known = connection.instruments();
    let open = known.find(|one| one.phase == Phase::Open);
    let market = *open.ok_or("no instrument is open for trading")?;
    drop(known);

    let price = market.band_low_ticks.max(1);
    let order = NewOrder::limit(1, market.instrument, Side::Buy, price, 1).into();
    // One `flush` sends all appended requests.
    let sequence = connection.send(CHANNEL, &order)?;
    connection.flush();
    let ServerMessage::OrderAck(ack) = answer(&mut connection, sequence)? else {
        return Err("expected OrderAck as the first answer to the order".into());
    };
    let cancel = Cancel {
        client_order_id: 1,
        engine_order_id: 0,
    };
    let sequence = connection.send(CHANNEL, &cancel.into())?;
    connection.flush();
    answer(&mut connection, sequence)?;
    Ok(ack.order_id.to_string())
}

/// Polls until the final answer to a request arrives. After an error of `poll` the connection is
/// lost, and `connection.resume()` continues without a gap.
fn answer(connection: &mut Connection, sequence: Option<u64>) -> Result<ServerMessage, Failure> {
    let sequence = sequence.ok_or("send buffer is full: poll first")?;
    loop {
        connection.poll()?;
        while let Some(report) = connection.recv() {
            match report.message {
                ServerMessage::Rejected(no) if no.client_seq == sequence => {
                    return Err(reject_text(&no).into());
                }
                message if message.answers() == sequence => return Ok(message),
                _ => {}
            }
        }
    }
}
