//! Journalled state of the machine's clock: whether it is suspect, and the confirmed time.
//!
//! See `design.md` 8. The hot thread reads the clock itself.

use types::command::{ConfirmClock, SuspectClock};
use types::{Command, Id128, RejectReason, StateHasher};

use crate::admission::Admission;
use crate::control::duplicate_request;
use crate::request::{Reject, RejectDetails, Request};
use crate::state::table_row;

table_row! {
    /// Journalled state of the machine's clock.
    #[derive(Default)]
    pub struct ClockState {
        /// Nanoseconds by which the clock was ahead when it became suspect; 0 = not suspect.
        pub offset_ns: i64,
        /// Times up to this one are confirmed, even if the clock reads less.
        pub confirmed_ns: u64,
    }
}

impl ClockState {
    pub fn is_suspect(self) -> bool {
        self.offset_ns != 0
    }

    pub(crate) fn suspect(&mut self, c: &SuspectClock) {
        self.offset_ns = c.offset_ns;
    }

    pub(crate) fn confirm(&mut self, c: &ConfirmClock) {
        self.offset_ns = 0;
        self.confirmed_ns = self.confirmed_ns.max(c.through_ns);
    }

    pub(crate) fn hash(self, hash: &mut StateHasher) {
        hash.write_u64s(&[self.offset_ns.cast_unsigned(), self.confirmed_ns]);
    }
}

impl Admission {
    pub fn clock(&self) -> ClockState {
        self.tables.clock
    }

    pub(crate) fn admit_clock(&self, request: &Request, now_ns: u64) -> Result<Command, Reject> {
        match *request {
            Request::SuspectClock { offset_ns } => self.admit_suspect_clock(offset_ns),
            Request::ConfirmClock {
                offset_ns,
                through_ns,
                key_hash,
            } => self.admit_confirm_clock(offset_ns, through_ns, key_hash, now_ns),
            _ => unreachable!("not a clock request"),
        }
    }

    /// Admits only a change: the clock becomes suspect, with its offset at that time, or is right
    /// again (offset 0).
    fn admit_suspect_clock(&self, offset_ns: i64) -> Result<Command, Reject> {
        match self.tables.clock.is_suspect() == (offset_ns != 0) {
            true => Err(duplicate_request(RejectDetails::None)),
            false => Ok(Command::SuspectClock(SuspectClock { offset_ns })),
        }
    }

    /// Admits the confirmation of a suspect clock.
    ///
    /// # Errors
    /// `DUPLICATE_REQUEST` when the clock is not suspect, `MALFORMED` without an offset.
    fn admit_confirm_clock(
        &self,
        offset_ns: i64,
        through_ns: u64,
        key_hash: Id128,
        now_ns: u64,
    ) -> Result<Command, Reject> {
        if !self.tables.clock.is_suspect() {
            return Err(duplicate_request(RejectDetails::None));
        }
        if offset_ns == 0 {
            return Err(RejectReason::Malformed.into());
        }
        Ok(Command::ConfirmClock(ConfirmClock {
            offset_ns,
            // The command's own time is in the journal too.
            through_ns: through_ns.max(now_ns),
            key_hash,
        }))
    }
}
