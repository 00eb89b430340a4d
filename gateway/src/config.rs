//! Settings of the gateway. Every default is a proposal of `docs/decisions` and may be changed in
//! the configuration file.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::identity::LimitBasis;

/// Default of `unread_timeout_ms`: time for a slow reader to show that it reads.
const UNREAD_TIMEOUT_MS: u64 = 30_000;
/// Bytes per second that a client with quinn's default window has to read.
const READ_BYTES_PER_S: u64 = 5_300;
/// A client shows by flow control alone that it reads. quinn sends it once an eighth of the
/// receive window, by default 1.25 MB, has been read.
const CREDIT_BYTES: u64 = 1_250_000 / 8;
const _: () = assert!(READ_BYTES_PER_S * UNREAD_TIMEOUT_MS / 1_000 >= CREDIT_BYTES);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Data folder: `market.db`, `acts.db`, `tls/`.
    pub data_dir: PathBuf,
    /// Number of the engine node, contained in public ids.
    pub node: u8,
    /// UDP address of the trading protocol; port 0 = any free one.
    pub quic_listen: SocketAddr,
    /// Messages per second and session; 0 = no limit (D33). This and the next two are defaults,
    /// journalled at the start if changed. `SetMemberBounds` sets other values.
    pub throttle_per_s: u32,
    /// Messages per second and user, over all its sessions; 0 = no limit.
    pub user_throttle_per_s: u32,
    /// Messages per second and member group, over all sessions of its users; 0 = no limit.
    pub group_throttle_per_s: u32,
    /// Maximum concurrent trading connections, in total and per address (IPv6: per /64 network).
    pub connections_max: u32,
    pub connections_per_address_max: u32,
    /// Resend window in memory: bytes of all sessions together, and messages of one session. Older
    /// messages come from the journal.
    pub window_bytes_max: usize,
    pub window_messages_max: usize,
    /// Sessions of a user, closed ones included until they are forgotten. A default, journalled at
    /// the start if changed.
    pub sessions_per_user_max: u32,
    /// Open orders of a user, at most a sixteenth of the node's 1,048,576, and those of a user on
    /// one instrument. Journalled at the start if changed; orders already open stay.
    pub open_orders_per_user: u32,
    pub open_orders_per_instrument: u32,
    /// Maximum lots, and maximum value in roubles, of one order; 0 = no limit. `SetMemberBounds`
    /// sets other bounds for users and member groups.
    pub lots_per_order: u64,
    pub roubles_per_order: u32,
    /// MiB of journal per minute that one user's requests and their effects may take; 0 = no limit.
    /// Above it only requests that reduce risk pass until the minute is over.
    pub journal_mib_per_minute: u32,
    /// Order messages that a user may send per day for each of its trades, above the first 100,000;
    /// 0 = no limit. Above it new orders and amends pass ten times a second.
    pub order_messages_per_trade: u32,
    /// Logins per second and user; 0 = no limit.
    pub logins_per_s: u32,
    /// Longest silence of a client, in milliseconds.
    pub heartbeat_ms: u32,
    /// Time limit of a connection's first login, and of the next one once no session is left, in
    /// milliseconds.
    pub login_timeout_ms: u64,
    /// How long a client may read nothing while messages that it has asked for wait, in
    /// milliseconds. Not in the configuration file: tests shorten it.
    #[serde(skip)]
    pub unread_timeout_ms: u64,
    /// Amount that is checked against the TRADING limit (T23).
    pub trading_limit_basis: LimitBasis,
    /// Price collar of market orders, in parts per million of the best opposite price (T19).
    pub collar_ppm: u32,
    /// Velocity halt (F08): how far trades may move the price within a window before the instrument
    /// halts, in parts per million of the window's reference price; 0 = off.
    pub velocity_ppm: u32,
    /// Length of that window, in milliseconds; 0 = off.
    pub velocity_window_ms: u32,
    /// Trading fee in parts per million (8.3).
    pub fee_ppm: u32,
    /// Age at which a hold unknown to the journal is adopted, and idle time after which an order's
    /// unused hold is closed, in milliseconds (`design.md` 4).
    pub orphan_hold_age_ms: u64,
    /// Time after a user's last session at which a trading hold without open orders is closed, in
    /// milliseconds; 0 = never (`design.md` 4).
    pub trading_hold_idle_ms: u64,
    /// Time after which a closed session without open or unsettled orders is forgotten, in seconds;
    /// 0 = never. A login under its name then starts a new session.
    pub session_retention_s: u64,
    /// Days after which the correlation id of a call is removed from the market's file; 0 = never.
    /// Only the events of the call's command contain it.
    pub request_retention_days: u32,
    /// Interval of the sweeper, and of the scan for idle sessions, in milliseconds.
    pub sweep_interval_ms: u64,
    /// How long a call that shrinks or closes a hold waits for settlement to release the money in
    /// the ledger, in milliseconds.
    pub release_wait_ms: u64,
    /// How long a read waits for the history to reach what is durable, in milliseconds.
    pub read_wait_ms: u64,
    /// How long a read of books, orders and holds waits for the replica to reach the last assigned
    /// sequence, in milliseconds.
    pub replica_wait_ms: u64,
    /// Interval of the gauges, in milliseconds.
    pub gauge_interval_ms: u64,
    /// Sessions may choose a self-trade group of their own, so that a user may trade with itself;
    /// off by default (T43).
    pub stp_groups: bool,
    /// Failed logins per minute, under one session name from one address, after which such logins
    /// are refused. After ten times as many from one address its connections are refused.
    pub failed_logins_max: u32,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("data/gateway"),
            node: 1,
            quic_listen: SocketAddr::from(([127, 0, 0, 1], 8090)),
            throttle_per_s: 5_000,
            user_throttle_per_s: 20_000,
            group_throttle_per_s: 50_000,
            connections_max: 1_024,
            connections_per_address_max: 512,
            window_bytes_max: 128 << 20,
            window_messages_max: 16_384,
            sessions_per_user_max: 1_000,
            open_orders_per_user: 65_536,
            open_orders_per_instrument: 16_384,
            lots_per_order: 0,
            roubles_per_order: 1_000_000_000,
            journal_mib_per_minute: 128,
            order_messages_per_trade: 500,
            logins_per_s: 100,
            heartbeat_ms: 10_000,
            login_timeout_ms: 5_000,
            unread_timeout_ms: UNREAD_TIMEOUT_MS,
            trading_limit_basis: LimitBasis::Quantity,
            collar_ppm: 50_000,
            velocity_ppm: 0,
            velocity_window_ms: 0,
            fee_ppm: 1_000,
            orphan_hold_age_ms: 60_000,
            trading_hold_idle_ms: 900_000,
            session_retention_s: 2_592_000,
            request_retention_days: 30,
            sweep_interval_ms: 30_000,
            release_wait_ms: 2_000,
            read_wait_ms: 1_000,
            replica_wait_ms: 100,
            gauge_interval_ms: 1_000,
            stp_groups: false,
            failed_logins_max: 5,
        }
    }
}
