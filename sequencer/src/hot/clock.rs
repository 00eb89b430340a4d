//! Clock discipline on the hot thread (`design.md` 8).
//!
//! While the clock is suspect new orders are refused and no order expires. Both transitions
//! are journalled.

use admission::Request;
use types::{Command, RejectReason};

use super::Hot;

impl Hot {
    /// Journals that the clock has become suspect or has recovered. Retried after `BUSY`.
    #[inline]
    pub(super) fn check_clock(&mut self) -> bool {
        let suspect_ns = self.config.clock.suspect_ns();
        let is_journalled = self.core.admission().clock().is_suspect();
        self.is_clock_suspect = suspect_ns.is_some() || is_journalled;
        if suspect_ns.is_some() == is_journalled {
            return false;
        }
        self.journal_clock(suspect_ns.unwrap_or(0))
    }

    #[cold]
    fn journal_clock(&mut self, offset_ns: i64) -> bool {
        if self.keep.is_failed() {
            return false;
        }
        let is_journalled = self
            .own_request(&Request::SuspectClock { offset_ns })
            .is_ok();
        self.is_clock_suspect = offset_ns != 0 || !is_journalled;
        is_journalled
    }

    /// Why a new order is refused at this moment, if it is.
    #[inline]
    pub(super) fn refuses_orders(&self, clock_ns: u64) -> Option<RejectReason> {
        match self.is_clock_suspect {
            true => Some(RejectReason::ClockUnconfirmed),
            false => self.intake.refuses(clock_ns),
        }
    }

    /// Switches to the machine's clock once the confirmation has a sequence. If the command is lost
    /// in a crash, the next start compares the clocks again.
    pub(super) fn watch_clock(&mut self, command: &Command) {
        if !matches!(command, Command::ConfirmClock(_)) {
            return;
        }
        if let Some(confirmed) = self.config.clock.confirm() {
            let by_ns = i128::from(confirmed.to_ns) - i128::from(confirmed.from_ns);
            self.timers.shift(i64::try_from(by_ns).unwrap_or(0));
            self.intake.clock_was_set();
        }
        self.is_clock_suspect = self.config.clock.suspect_ns().is_some();
    }
}
