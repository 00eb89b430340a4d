//! Derives platform time from the machine's clocks. Pure: readings in, time and state out
//! (`design.md` 8).
//!
//! Time advances with the monotonic clock and is anchored to the real-time clock:
//!
//! | real time differs from platform time by | action |
//! |---|---|
//! | at most [`SLEW_MAX_NS`] | slew |
//! | at most [`STEP_MAX_NS`], forward, clock synchronised | step |
//! | at most [`STEP_MAX_NS`], otherwise | slew |
//! | more, in either direction | [`State::Suspect`]: time follows the monotonic clock alone |
//!
//! The state is also suspect while real time is more than [`STEP_MAX_NS`] before a stored time. The
//! state returns to normal when the clock is correct again, or by [`Discipline::confirm`], which
//! accepts real time. Time goes back in two cases only: at a confirmation, and at a start with a
//! forward step that a store shows as unconfirmed.

/// Largest correction that is always slewed. NTP steps a clock above the same limit.
pub const SLEW_MAX_NS: i64 = 128_000_000;
/// Largest difference corrected without an operator, for example after a pause of the virtual
/// machine.
pub const STEP_MAX_NS: i64 = 60_000_000_000;
/// A slew moves time by one nanosecond in this number: 500 ppm, the rate of the kernel's
/// discipline. 128 ms take 256 s, and an interval is off by at most 0.05 %.
pub const SLEW_DIVISOR: u64 = 2_000;

/// The machine's clocks at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Nanoseconds of the monotonic clock.
    pub monotonic_ns: u64,
    /// Unix time in nanoseconds, from the clock that can step.
    pub realtime_ns: u64,
    /// Whether the system reports its real-time clock as synchronised.
    pub is_synchronised: bool,
}

/// Relation of platform time to real time since the last reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Platform time slews towards real time by `slew_ns`; 0 = they agree.
    Normal { slew_ns: i64 },
    /// Real time differs by `offset_ns`; the difference is not confirmed.
    Suspect { offset_ns: i64 },
}

impl State {
    /// Nanoseconds by which real time is ahead of platform time, negative if real time is earlier.
    /// `None` if normal.
    pub fn suspect_ns(self) -> Option<i64> {
        match self {
            Self::Normal { .. } => None,
            Self::Suspect { offset_ns } => Some(offset_ns),
        }
    }

    /// Operator message: what happened, by how much, and what to do. `None` if normal.
    pub fn operator_message(self) -> Option<String> {
        let offset_ns = self.suspect_ns()?;
        let side = if offset_ns > 0 { "ahead of" } else { "behind" };
        let offset_s = offset_ns / 1_000_000_000;
        Some(format!(
            "the machine's clock is {} s {side} the platform's time: new orders are refused \
             (CLOCK_UNCONFIRMED); set the machine's clock right, or let two persons accept it: \
             `platform market confirm-clock --offset-seconds {offset_s} --approval REASON`, then \
             `platform approval approve`",
            offset_s.abs()
        ))
    }
}

/// Time as a function of the monotonic clock, until the next reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    pub monotonic_ns: u64,
    pub time_ns: u64,
    /// Remaining correction.
    pub slew_ns: i64,
}

impl Segment {
    /// Unix time in nanoseconds at a monotonic reading. Monotonic in its argument.
    #[inline]
    pub fn at(&self, monotonic_ns: u64) -> u64 {
        let elapsed_ns = monotonic_ns.saturating_sub(self.monotonic_ns);
        let slewed_ns = (elapsed_ns / SLEW_DIVISOR).min(self.slew_ns.unsigned_abs());
        let time_ns = self.time_ns.saturating_add(elapsed_ns);
        match self.slew_ns < 0 {
            true => time_ns - slewed_ns,
            false => time_ns.saturating_add(slewed_ns),
        }
    }
}

/// Times in a store, read at start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Time of its last record.
    pub last_ns: u64,
    /// Times up to this one are confirmed, even if real time is earlier.
    pub confirmed_ns: u64,
    /// The suspect difference at the last record, 0 = none.
    pub suspect_ns: i64,
}

/// Effect of a confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmed {
    /// Time before and after.
    pub from_ns: u64,
    pub to_ns: u64,
}

#[derive(Clone, Debug)]
pub struct Discipline {
    segment: Segment,
    state: State,
    /// Latest stored time, and latest confirmed time.
    stored_ns: u64,
    confirmed_ns: u64,
    /// Unconfirmed forward step of an earlier process. While real time is about as far ahead, it
    /// may still include that step.
    carried_ns: Option<i64>,
}

/// `a - b`, saturating.
fn difference(a: u64, b: u64) -> i64 {
    i64::try_from(i128::from(a) - i128::from(b)).unwrap_or(if a > b { i64::MAX } else { i64::MIN })
}

impl Discipline {
    /// Time starts at real time: there is no other reference until a store is read.
    pub fn new(reading: Reading) -> Self {
        Self {
            segment: anchor(reading.monotonic_ns, reading.realtime_ns, 0),
            state: State::Normal { slew_ns: 0 },
            stored_ns: 0,
            confirmed_ns: 0,
            carried_ns: None,
        }
    }

    pub fn segment(&self) -> Segment {
        self.segment
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// Latest time stored or returned. A confirmation accepts times up to this one.
    pub fn latest_ns(&self, monotonic_ns: u64) -> u64 {
        self.stored_ns.max(self.segment.at(monotonic_ns))
    }

    /// Compares platform time with the machine's clocks and corrects it. Call about once per
    /// second.
    pub fn observe(&mut self, reading: Reading) -> State {
        let time_ns = self.segment.at(reading.monotonic_ns);
        let offset_ns = difference(reading.realtime_ns, time_ns);
        let was_before_stored = self.is_before_stored(time_ns);
        if self.is_before_stored(reading.realtime_ns) {
            let offset_ns = difference(reading.realtime_ns, self.stored_ns.max(time_ns));
            return self.suspect(reading, time_ns, offset_ns);
        }
        if let Some(carried_ns) = self.carried_ns {
            if offset_ns >= carried_ns - STEP_MAX_NS {
                return self.suspect(reading, time_ns, offset_ns);
            }
            self.carried_ns = None;
            if offset_ns >= 0 {
                return self.step(reading);
            }
        }
        // Platform time was before a stored time, so the size of this forward step is no evidence
        // of a wrong clock.
        if was_before_stored && offset_ns >= 0 {
            return self.step(reading);
        }
        if offset_ns.unsigned_abs() > STEP_MAX_NS.unsigned_abs() {
            self.suspect(reading, time_ns, offset_ns)
        } else if offset_ns > SLEW_MAX_NS && reading.is_synchronised {
            self.step(reading)
        } else {
            self.slew(reading, time_ns, offset_ns)
        }
    }

    /// Compares a store's times with real time. A store far in the past is no evidence of a wrong
    /// clock: the platform may have been stopped.
    pub fn check_stored(&mut self, stored: Stored, reading: Reading) -> State {
        self.stored_ns = self.stored_ns.max(stored.last_ns);
        self.confirmed_ns = self.confirmed_ns.max(stored.confirmed_ns);
        let ahead_ns = difference(reading.realtime_ns, stored.last_ns);
        let is_still_ahead =
            stored.suspect_ns > 0 && ahead_ns >= stored.suspect_ns.saturating_sub(STEP_MAX_NS);
        if is_still_ahead && self.state.suspect_ns().is_none() {
            self.carried_ns = Some(stored.suspect_ns);
            self.segment = anchor(reading.monotonic_ns, stored.last_ns, 0);
        }
        self.observe(reading)
    }

    /// Accepts real time and every stored time. `None` if the clock is not suspect.
    pub fn confirm(&mut self, reading: Reading) -> Option<Confirmed> {
        self.state.suspect_ns()?;
        let from_ns = self.segment.at(reading.monotonic_ns);
        self.confirmed_ns = self.confirmed_ns.max(self.latest_ns(reading.monotonic_ns));
        self.carried_ns = None;
        self.step(reading);
        let to_ns = reading.realtime_ns;
        Some(Confirmed { from_ns, to_ns })
    }

    /// Whether `time_ns` is more than [`STEP_MAX_NS`] before an unconfirmed stored time.
    fn is_before_stored(&self, time_ns: u64) -> bool {
        difference(self.stored_ns, time_ns.max(self.confirmed_ns)) > STEP_MAX_NS
    }

    /// Steps to real time.
    fn step(&mut self, reading: Reading) -> State {
        self.slew(reading, reading.realtime_ns, 0)
    }

    fn slew(&mut self, reading: Reading, time_ns: u64, slew_ns: i64) -> State {
        self.segment = anchor(reading.monotonic_ns, time_ns, slew_ns);
        self.state = State::Normal { slew_ns };
        self.state
    }

    /// Marks the clock suspect. An offset within [`STEP_MAX_NS`] of the reported one keeps the
    /// reported value, because an operator confirms that figure.
    fn suspect(&mut self, reading: Reading, time_ns: u64, offset_ns: i64) -> State {
        let offset_ns = match self.state.suspect_ns() {
            Some(old_ns) if old_ns.abs_diff(offset_ns) <= STEP_MAX_NS.unsigned_abs() => old_ns,
            _ => offset_ns,
        };
        self.segment = anchor(reading.monotonic_ns, time_ns, 0);
        self.state = State::Suspect { offset_ns };
        self.state
    }
}

fn anchor(monotonic_ns: u64, time_ns: u64, slew_ns: i64) -> Segment {
    Segment {
        monotonic_ns,
        time_ns,
        slew_ns,
    }
}

#[cfg(test)]
mod tests;
