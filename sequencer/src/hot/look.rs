//! Somebody's look at the state: the one thing for which the hot thread waits for its engines.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::Hot;
use crate::port::Look;

impl Hot {
    /// Lets somebody look at the state between two commands: waits until nothing is under way and borrows the
    /// books for the look.
    pub(super) fn show(&mut self, read: Look) {
        while !self.flights.is_empty() {
            self.pump();
        }
        for at in 0..self.lanes.len() {
            while !self.lanes[at].ask_for_book() {
                self.crew.step_all();
                self.check_crew();
            }
            self.crew.ring(at);
        }
        for at in 0..self.lanes.len() {
            let book = loop {
                if let Some(book) = self.lanes[at].borrow_book() {
                    break book;
                }
                self.crew.step_all();
                self.check_crew();
                std::hint::spin_loop();
            };
            self.core.places()[at] = Some(book);
        }
        // A bug in what somebody wants to know must not stop the market: the look has no hand on the state.
        let core = &self.core;
        if catch_unwind(AssertUnwindSafe(|| read(core))).is_err() {
            tracing::error!("a look at the books ended with a panic");
        }
        for (lane, place) in self.lanes.iter_mut().zip(self.core.places()) {
            lane.return_book(place.take().expect("borrowed above"));
        }
    }
}
