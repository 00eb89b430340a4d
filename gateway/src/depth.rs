//! What the books show: depth of one instrument, state of all. Read between two commands of the trading path and told only once the journal has them
//! on disk, so that nobody sees what a crash could withdraw. Nothing is cached: a snapshot is never older than the last durable order (R178, T42).

use tonic::Status;
use types::{InstrumentId, InstrumentSpec, Lots, Phase, Sequence, Side, Ticks, UserIx};

use crate::market::{Market, now_us};
use crate::refusal;

/// Levels a side when the caller names none (D40).
pub const LEVELS_DEFAULT: u32 = 50;
/// With more open orders no hash is returned: while it is computed no reads are served and the replica
/// waits.
const HASHED_ORDERS_MAX: usize = 50_000;
/// Most levels a side.
pub const LEVELS_MAX: u32 = 1_000;

pub struct BookView {
    pub spec: InstrumentSpec,
    pub phase: Phase,
    /// Best first.
    pub bids: Vec<(Ticks, Lots)>,
    pub asks: Vec<(Ticks, Lots)>,
    pub sequence: Sequence,
    pub captured_at_us: i64,
}

pub struct InstrumentLine {
    pub spec: InstrumentSpec,
    pub phase: Phase,
    pub open_orders: u64,
    pub trades: u64,
    pub best_bid: Option<Ticks>,
    pub best_ask: Option<Ticks>,
}

pub struct MarketView {
    pub commit_sequence: u64,
    pub settled_sequence: u64,
    pub trades_pending: u64,
    pub trades_settled: u64,
    pub instruments: Vec<InstrumentLine>,
    /// For staff alone.
    pub state_hash: Option<u64>,
    /// Everybody's kill switch is engaged (F11).
    pub is_killed: bool,
    /// Whose own is; for staff alone.
    pub killed_users: Vec<String>,
}

/// `Instrument not found` for an unknown one; empty sides for an empty book.
pub async fn book(market: &Market, instrument_id: &str, depth: u32) -> Result<BookView, Status> {
    let id = InstrumentId::new(instrument_id).map_err(|_| refusal::instrument_not_found())?;
    let levels = match depth {
        0 => LEVELS_DEFAULT,
        given => given.min(LEVELS_MAX),
    };
    let view = market
        .look(|state| {
            let core = state.core();
            let ix = core.admission().instrument_ix(&id)?;
            let book = core.book(ix)?;
            let side = |side| {
                let levels = book.depth(side).take(levels as usize);
                levels.map(|level| (level.price, level.open)).collect()
            };
            Some(BookView {
                spec: *core.admission().spec(ix)?,
                phase: book.phase(),
                bids: side(Side::Buy),
                asks: side(Side::Sell),
                sequence: core.sequence(),
                captured_at_us: now_us(),
            })
        })
        .await?;
    view.ok_or_else(refusal::instrument_not_found)
}

/// State of every instrument and of settlement; for staff with the hash of a state that is not too
/// large for it.
pub async fn status(market: &Market, for_staff: bool) -> Result<MarketView, Status> {
    market
        .look(|state| {
            let core = state.core();
            let lines = core.books().map(|book| InstrumentLine {
                spec: *book.spec(),
                phase: book.phase(),
                open_orders: book.resting() as u64,
                trades: book.trade_number(),
                best_bid: book.best(Side::Buy),
                best_ask: book.best(Side::Sell),
            });
            let lines: Vec<InstrumentLine> = lines.collect();
            let admission = core.admission();
            let is_small = admission.orders().take(HASHED_ORDERS_MAX + 1).count();
            let is_hashed = for_staff && is_small <= HASHED_ORDERS_MAX;
            let hash = is_hashed.then(|| core.state_hash());
            let killed = admission.killed_users().filter(|_| for_staff);
            let killed: Vec<String> = killed.map(|id| id.to_string()).collect();
            let settlement = admission.settlement();
            MarketView {
                commit_sequence: core.sequence().0,
                settled_sequence: settlement.posted.0,
                trades_pending: core.trades().saturating_sub(settlement.trades_final),
                trades_settled: settlement.trades_final.saturating_sub(admission.busts()),
                instruments: lines,
                state_hash: hash,
                is_killed: admission.kill_switch(UserIx::NONE),
                killed_users: killed,
            }
        })
        .await
}
