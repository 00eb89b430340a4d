//! Commands that end the orders of a list: to the engines of those orders alone.

use types::Envelope;
use types::command::Listed;

use super::Hot;
use crate::flight::Owed;
use crate::lane::Lane;

impl Hot {
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
