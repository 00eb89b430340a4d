//! Lag of the journal's consumers, and the backpressure it causes (`design.md` 6). A disk that is
//! nearly full closes the market in the same way.
//!
//! Settlement, the sessions' instruments and the checkpoints gate the market. Each has a bound:
//!
//! - Above half of it the market warns.
//! - Above three quarters it throttles new orders.
//! - Above the bound it refuses them, and amends that improve a price or add quantity.
//!
//! Requests that reduce risk always pass. The market reopens at half of the bound. Other consumers
//! delay the journal's truncation, never the market.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use types::{RejectReason, Sequence};

/// Pause between two new orders while they are throttled.
const THROTTLE_GAP_NS: u64 = 1_000_000;

/// Bounds on outstanding trades and records. A lag equal to its bound still passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bounds {
    /// Trades that are durable and not final.
    pub trades: u64,
    /// Records that settlement has not applied.
    pub settlement: u64,
    /// Records whose instruments the sessions do not have.
    pub sessions: u64,
    /// Records after the newest checkpoint: what a restart replays.
    pub checkpoint: u64,
}

impl Bounds {
    pub const NONE: Self = Self {
        trades: u64::MAX,
        settlement: u64::MAX,
        sessions: u64::MAX,
        checkpoint: u64::MAX,
    };

    /// Name and value of the smallest bound.
    pub fn least(&self) -> (&'static str, u64) {
        let all = [
            ("trades", self.trades),
            ("settlement", self.settlement),
            ("sessions", self.sessions),
            ("checkpoint", self.checkpoint),
        ];
        let least = all.into_iter().min_by_key(|(_, bound)| *bound);
        least.expect("there are four")
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            trades: 200_000,
            settlement: 1_000_000,
            sessions: 1_000_000,
            checkpoint: 20_000_000,
        }
    }
}

/// Positions of the consumers: they write, the hot thread reads.
pub struct Backlog {
    /// Trades that are durable and not final yet.
    pub pending_trades: AtomicU64,
    /// Last record that settlement has applied.
    settlement: AtomicU64,
    /// Number of settlement's own later records that it has not read.
    settlement_own: AtomicU64,
    /// Last record that the replica has applied; the sessions read from it.
    sessions: AtomicU64,
    /// Last record of the newest checkpoint.
    checkpoint: AtomicU64,
    sessions_stalled: AtomicBool,
    bounds: Bounds,
    settlement_failed: AtomicBool,
    is_closed: AtomicBool,
    is_disk_low: AtomicBool,
}

impl Backlog {
    pub fn new(bounds: Bounds) -> Self {
        Self {
            pending_trades: AtomicU64::new(0),
            // No lag before a consumer reports its position.
            settlement: AtomicU64::new(u64::MAX),
            settlement_own: AtomicU64::new(0),
            sessions: AtomicU64::new(u64::MAX),
            checkpoint: AtomicU64::new(u64::MAX),
            sessions_stalled: AtomicBool::new(false),
            bounds,
            settlement_failed: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            is_disk_low: AtomicBool::new(false),
        }
    }

    /// Sets settlement's position, and the number of its own later records that it has not read.
    ///
    /// Until the next call its lag grows with the journal.
    pub fn settlement_has(&self, sequence: Sequence, own_unread: u64) {
        self.settlement.store(sequence.get(), Ordering::Relaxed);
        self.settlement_own.store(own_unread, Ordering::Relaxed);
    }

    /// Sets whether settlement has failed. While it has, new orders are refused.
    pub fn settlement_failed(&self, failed: bool) {
        self.settlement_failed.store(failed, Ordering::Relaxed);
    }

    /// Records up to `sequence` that settlement has not applied, without its own; `u64::MAX` after
    /// settlement has failed.
    #[inline]
    pub fn settlement_lag(&self, sequence: Sequence) -> u64 {
        if self.settlement_failed.load(Ordering::Relaxed) {
            return u64::MAX;
        }
        let lag = sequence
            .get()
            .saturating_sub(self.settlement.load(Ordering::Relaxed));
        lag.saturating_sub(self.settlement_own.load(Ordering::Relaxed))
    }

    /// Sets the replica's position, up to which sessions read instruments and older messages.
    ///
    /// New messages come from the hot thread.
    pub fn sessions_at(&self, sequence: Sequence) {
        self.sessions.store(sequence.get(), Ordering::Relaxed);
    }

    /// Sets whether the replica cannot read the journal for now, for lack of a file descriptor.
    /// While it cannot, new orders are refused (`design.md` 7).
    pub fn sessions_stalled(&self, is_stalled: bool) {
        self.sessions_stalled.store(is_stalled, Ordering::Relaxed);
    }

    /// Sets the position of the newest checkpoint, from which a restart replays.
    pub fn checkpoint_at(&self, sequence: Sequence) {
        self.checkpoint.store(sequence.get(), Ordering::Relaxed);
    }

    /// Refuses new orders until the next start: reports and settlement read a state that cannot be
    /// trusted.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Sets whether a disk is nearly full. While one is, new orders are refused.
    pub fn set_disk_low(&self, is_low: bool) {
        self.is_disk_low.store(is_low, Ordering::Relaxed);
    }

    pub fn is_disk_low(&self) -> bool {
        self.is_disk_low.load(Ordering::Relaxed)
    }

    /// Lag of each of [`GATES`] at `sequence`, and its bound.
    #[inline]
    fn lags(&self, sequence: Sequence) -> [(u64, u64); GATES.len()] {
        let load = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let lag = |of: &AtomicU64| sequence.get().saturating_sub(load(of));
        let (bounds, is_closed) = (&self.bounds, self.is_closed.load(Ordering::Relaxed));
        let is_stalled = self.sessions_stalled.load(Ordering::Relaxed);
        [
            (load(&self.pending_trades), bounds.trades),
            (self.settlement_lag(sequence), bounds.settlement),
            (lag(&self.sessions), bounds.sessions),
            (lag(&self.checkpoint), bounds.checkpoint),
            (u64::from(is_stalled), 0),
            (u64::from(is_closed), 0),
            (u64::from(self.is_disk_low()), 0),
        ]
    }
}

/// Cause that each lag of [`Backlog::lags`] belongs to.
const GATES: [IntakeCause; 7] = [
    IntakeCause::Settlement,
    IntakeCause::Settlement,
    IntakeCause::Sessions,
    IntakeCause::Checkpoint,
    IntakeCause::Sessions,
    IntakeCause::Replica,
    IntakeCause::Disk,
];

impl Default for Backlog {
    fn default() -> Self {
        Self::new(Bounds::default())
    }
}

/// The consumer, or the disk, that the market waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum IntakeCause {
    Settlement = 0,
    Sessions = 1,
    Checkpoint = 2,
    /// The replica has ended: new orders are refused until the next start.
    Replica = 3,
    Disk = 4,
}

impl IntakeCause {
    const ALL: [Self; 5] = [
        Self::Settlement,
        Self::Sessions,
        Self::Checkpoint,
        Self::Replica,
        Self::Disk,
    ];
    const COUNT: u64 = Self::ALL.len() as u64;

    fn reason(self) -> RejectReason {
        match self {
            Self::Settlement => RejectReason::SettlementBacklog,
            Self::Sessions => RejectReason::SessionsBacklog,
            Self::Checkpoint => RejectReason::CheckpointBacklog,
            Self::Replica => RejectReason::ReplicaEnded,
            Self::Disk => RejectReason::DiskLow,
        }
    }
}

/// How far the intake of requests is restricted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    #[default]
    Open,
    /// Not restricted: a warning for operators.
    Warning(IntakeCause),
    /// One new order per millisecond.
    Throttled(IntakeCause),
    /// No new order.
    Closed(IntakeCause),
}

impl Stage {
    /// 0 for open to 3 for closed.
    pub fn level(self) -> u8 {
        (self.code() / IntakeCause::COUNT) as u8
    }

    /// Encoding that [`Stage::of_code`] decodes.
    pub(crate) fn code(self) -> u64 {
        match self {
            Self::Open => 0,
            Self::Warning(cause) => IntakeCause::COUNT + cause as u64,
            Self::Throttled(cause) => 2 * IntakeCause::COUNT + cause as u64,
            Self::Closed(cause) => 3 * IntakeCause::COUNT + cause as u64,
        }
    }

    pub(crate) fn of_code(code: u64) -> Self {
        let (level, cause) = (code / IntakeCause::COUNT, code % IntakeCause::COUNT);
        Self::of(level as u8, IntakeCause::ALL[cause as usize])
    }

    fn of(level: u8, cause: IntakeCause) -> Self {
        match level {
            0 => Self::Open,
            1 => Self::Warning(cause),
            2 => Self::Throttled(cause),
            _ => Self::Closed(cause),
        }
    }

    /// Why new orders are refused, always or while throttled; `None` while all of them pass.
    pub fn reason(self) -> Option<RejectReason> {
        match self {
            Self::Open | Self::Warning(_) => None,
            Self::Throttled(cause) | Self::Closed(cause) => Some(cause.reason()),
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open => f.write_str("open"),
            Self::Warning(cause) => write!(f, "{}: past half of the bound", cause.reason()),
            Self::Throttled(cause) => write!(f, "{}: new orders are throttled", cause.reason()),
            Self::Closed(cause) => write!(f, "{}: new orders are refused", cause.reason()),
        }
    }
}

/// Stages on the hot thread, with hysteresis: each gate reopens at half of its bound.
#[derive(Debug, Default)]
pub(crate) struct Intake {
    /// Level of each gate: 0 open to 3 closed.
    levels: [u8; GATES.len()],
    stage: Stage,
    /// Earliest time of the next new order while throttled.
    next_new_ns: u64,
}

impl Intake {
    /// Updates the stage from the lags at `sequence`; true when it has changed.
    #[inline]
    pub fn update(&mut self, backlog: &Backlog, sequence: Sequence) -> bool {
        let lags = backlog.lags(sequence);
        let is_quiet = lags.iter().all(|(lag, bound)| *lag <= bound / 2);
        if is_quiet && self.stage == Stage::Open {
            return false;
        }
        self.update_levels(lags)
    }

    #[cold]
    fn update_levels(&mut self, lags: [(u64, u64); GATES.len()]) -> bool {
        for (level, (lag, bound)) in self.levels.iter_mut().zip(lags) {
            *level = match lag {
                lag if lag <= bound / 2 => 0,
                lag if lag > bound => 3,
                lag if lag > bound - bound / 4 => 2.max(*level),
                // Hysteresis: a falling lag keeps its level.
                _ => 1.max(*level),
            };
        }
        let worst = (0..GATES.len()).rev().max_by_key(|at| self.levels[*at]);
        let worst = worst.expect("there are gates");
        let stage = Stage::of(self.levels[worst], GATES[worst]);
        std::mem::replace(&mut self.stage, stage) != stage
    }

    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Reason for refusing a new order at `now_ns`; `None` if it passes.
    #[inline]
    pub fn refuses(&self, now_ns: u64) -> Option<RejectReason> {
        match self.stage {
            Stage::Throttled(_) if now_ns >= self.next_new_ns => None,
            stage => stage.reason(),
        }
    }

    /// True while no new order is accepted.
    #[inline]
    pub fn is_closed(&self) -> bool {
        matches!(self.stage, Stage::Closed(_))
    }

    /// Ends a pause that was based on the clock before it was set.
    pub fn clock_was_set(&mut self) {
        self.next_new_ns = 0;
    }

    /// Starts the pause after a new order or an amend.
    #[inline]
    pub fn entered(&mut self, now_ns: u64) {
        self.next_new_ns = now_ns + THROTTLE_GAP_NS;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backlog() -> Backlog {
        Backlog::new(Bounds {
            trades: 100,
            settlement: 1_000,
            sessions: 1_000,
            checkpoint: 1_000,
        })
    }

    fn stages(trades: &[u64]) -> Vec<Stage> {
        let (backlog, mut intake) = (backlog(), Intake::default());
        let mut stage = |trades: &u64| {
            backlog.pending_trades.store(*trades, Ordering::Relaxed);
            intake.update(&backlog, Sequence(5));
            intake.stage()
        };
        trades.iter().map(&mut stage).collect()
    }

    #[test]
    fn a_lag_warns_throttles_closes_and_opens_at_half_of_the_bound() {
        use IntakeCause::Settlement as S;
        use Stage::{Closed, Open, Throttled, Warning};
        let grows = [50, 51, 75, 76, 100, 101];
        let seen = [
            Open,
            Warning(S),
            Warning(S),
            Throttled(S),
            Throttled(S),
            Closed(S),
        ];
        assert_eq!(stages(&grows), seen);
        assert_eq!(
            stages(&[101, 100, 51, 50]),
            [Closed(S), Closed(S), Closed(S), Open]
        );
        assert_eq!(
            stages(&[76, 75, 51, 50]),
            [Throttled(S), Throttled(S), Throttled(S), Open]
        );
    }

    #[test]
    fn the_largest_lag_is_named() {
        let (backlog, mut intake) = (backlog(), Intake::default());
        assert!(
            !intake.update(&backlog, Sequence(9_999)),
            "no consumer is attached"
        );
        backlog.sessions_at(Sequence(4_000));
        backlog.checkpoint_at(Sequence(3_200));
        backlog.settlement_has(Sequence(3_390), 10);
        assert!(intake.update(&backlog, Sequence(4_000)));
        assert_eq!(intake.stage(), Stage::Throttled(IntakeCause::Checkpoint));
        backlog.settlement_has(Sequence(4_401), 0);
        intake.update(&backlog, Sequence(5_001));
        assert_eq!(intake.stage(), Stage::Closed(IntakeCause::Sessions));
        assert_eq!(intake.refuses(0), Some(RejectReason::SessionsBacklog));
        backlog.sessions_at(Sequence(5_001));
        backlog.checkpoint_at(Sequence(5_001));
        for (is_stalled, stage) in [
            (true, Stage::Closed(IntakeCause::Sessions)),
            (false, Stage::Warning(IntakeCause::Settlement)),
        ] {
            backlog.sessions_stalled(is_stalled);
            intake.update(&backlog, Sequence(5_001));
            assert_eq!(intake.stage(), stage);
        }
        backlog.close();
        intake.update(&backlog, Sequence(1));
        assert_eq!(intake.refuses(0), Some(RejectReason::ReplicaEnded));
    }

    #[test]
    fn a_low_disk_closes_the_market_until_it_has_room() {
        let (backlog, mut intake) = (backlog(), Intake::default());
        for (is_low, refused) in [(true, Some(RejectReason::DiskLow)), (false, None)] {
            backlog.set_disk_low(is_low);
            assert!(intake.update(&backlog, Sequence(5)));
            assert_eq!(intake.refuses(0), refused);
        }
    }

    #[test]
    fn a_recovered_consumer_does_not_close_the_market_for_another_one() {
        let (backlog, mut intake) = (backlog(), Intake::default());
        backlog.sessions_at(Sequence(0));
        let mut stage = |trades, sequence| {
            backlog.pending_trades.store(trades, Ordering::Relaxed);
            intake.update(&backlog, Sequence(sequence));
            intake.stage()
        };
        assert_eq!(stage(101, 550), Stage::Closed(IntakeCause::Settlement));
        assert_eq!(stage(60, 550), Stage::Closed(IntakeCause::Settlement));
        assert_eq!(stage(0, 550), Stage::Warning(IntakeCause::Sessions));
        assert_eq!(stage(0, 500), Stage::Open);
    }

    #[test]
    fn stalled_settlement_closes_the_market_as_the_journal_grows() {
        let (backlog, mut intake) = (backlog(), Intake::default());
        backlog.settlement_has(Sequence(100), 3);
        intake.update(&backlog, Sequence(1_103));
        assert_eq!(intake.stage(), Stage::Throttled(IntakeCause::Settlement));
        intake.update(&backlog, Sequence(1_104));
        assert_eq!(intake.stage(), Stage::Closed(IntakeCause::Settlement));
        backlog.settlement_has(Sequence(1_104), 0);
        intake.update(&backlog, Sequence(1_104));
        assert_eq!(intake.stage(), Stage::Open);
        backlog.settlement_failed(true);
        intake.update(&backlog, Sequence(1_104));
        assert_eq!(intake.stage(), Stage::Closed(IntakeCause::Settlement));
    }

    #[test]
    fn a_throttled_market_accepts_one_new_order_per_millisecond() {
        let (backlog, mut intake) = (backlog(), Intake::default());
        backlog.pending_trades.store(90, Ordering::Relaxed);
        intake.update(&backlog, Sequence(5));
        assert_eq!(intake.refuses(7), None);
        intake.entered(7);
        assert_eq!(intake.refuses(8), Some(RejectReason::SettlementBacklog));
        assert_eq!(intake.refuses(7 + THROTTLE_GAP_NS), None);
    }

    #[test]
    fn a_stage_is_read_from_its_code() {
        let with = |make: fn(IntakeCause) -> Stage| IntakeCause::ALL.map(make);
        let all = [Stage::Warning, Stage::Throttled, Stage::Closed].map(with);
        for stage in all.into_iter().flatten().chain([Stage::Open]) {
            assert_eq!(Stage::of_code(stage.code()), stage);
        }
    }
}
