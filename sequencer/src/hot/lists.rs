//! Commands that end the orders of a list: to the engines of those orders alone.

use types::command::{Listed, MassScope};
use types::{Envelope, UserIx};

use super::Hot;
use crate::flight::Owed;
use crate::lane::Lane;
use crate::port::NotTaken;

impl Hot {
    /// Lists the orders that the command to be admitted ends. `filtered`: user and scope of a mass cancel that
    /// may leave some of the owner's orders; returns the user and how many were walked and left.
    ///
    /// # Errors
    /// `THROTTLE`, with the wait in microseconds: the user has walked too many orders in vain.
    #[cold]
    pub(super) fn list(
        &mut self,
        filtered: Option<(UserIx, MassScope)>,
        now_ns: u64,
    ) -> Result<Option<(UserIx, u64)>, NotTaken> {
        let refused = filtered.and_then(|(user, _)| self.walks.refuses(user, now_ns));
        if let Some(reject) = refused {
            return Err(NotTaken::Refused(reject));
        }
        let admission = self.core.admission();
        admission.list(&self.flights.vacant().command, &mut self.listed);
        let listed = self.listed.len() as u64;
        Ok(filtered.map(|(user, scope)| {
            let walked = match scope {
                MassScope::Session(session) => {
                    admission.session(session).map_or(0, |row| row.open_orders)
                }
                _ => admission.user(user).map_or(0, |row| row.open_orders),
            };
            (user, u64::from(walked).saturating_sub(listed))
        }))
    }

    /// The lanes of the instruments in the list.
    pub(super) fn listed_lanes(&self) -> impl Iterator<Item = &Lane> {
        Listed::by_instrument(&self.listed).map(|list| &self.lanes[lane_of(list)])
    }

    /// As `launch`, for a command that ends the orders of a list: each engine also gets its part of the list.
    #[cold]
    pub(super) fn launch_listed(&mut self, owed: Owed) {
        let listed = std::mem::take(&mut self.listed);
        self.start(Listed::by_instrument(&listed).count(), owed);
        for list in Listed::by_instrument(&listed) {
            let at = lane_of(list);
            self.push_when_free(at, |lane, last| lane.push_sweep(last, list.len()));
            if self.lanes[at].is_first() {
                self.busy.push(at);
            }
            for order in list {
                self.push_when_free(at, |lane, _| lane.push_listed(*order));
            }
            self.crew.ring(at);
        }
        self.listed = listed;
    }

    /// Pushes into a lane until there is a free slot: its engine works meanwhile. A list longer than the ring
    /// waits for the engine, however long that takes; an engine that has ended ends the hot thread.
    #[inline]
    pub(super) fn push_when_free(
        &mut self,
        at: usize,
        push: impl Fn(&mut Lane, &Envelope) -> bool,
    ) {
        loop {
            let last = self.flights.last().expect("it is under way");
            if push(&mut self.lanes[at], last) {
                return;
            }
            self.wait_for(at);
        }
    }

    #[cold]
    fn wait_for(&mut self, at: usize) {
        self.crew.ring(at);
        self.pump();
        self.check_crew();
    }
}

/// The lane of one instrument's part of the list.
fn lane_of(list: &[Listed]) -> usize {
    list[0].instrument.index()
}
