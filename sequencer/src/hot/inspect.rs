//! Inspection of the state between two commands.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::Hot;
use crate::port::Inspection;

impl Hot {
    /// Runs `read` between two commands: waits until nothing is in flight and borrows the books.
    pub(super) fn inspect(&mut self, read: Inspection) {
        while !self.in_flight.is_empty() {
            self.pump_or_yield();
        }
        self.keep.flush(false);
        for at in 0..self.engine_rings.len() {
            while !self.engine_rings[at].request_book() {
                self.check_engine_pool();
            }
            self.engine_pool.unpark(at);
        }
        for at in 0..self.engine_rings.len() {
            let book = loop {
                if let Some(book) = self.engine_rings[at].borrow_book() {
                    break book;
                }
                self.check_engine_pool();
                std::hint::spin_loop();
            };
            self.core.places()[at] = Some(book);
        }
        // A panic in `read` must not stop the market. `read` cannot change the state.
        let core = &self.core;
        if catch_unwind(AssertUnwindSafe(|| read(core))).is_err() {
            tracing::error!("an inspection of the books panicked");
        }
        for (engine_ring, place) in self.engine_rings.iter_mut().zip(self.core.places()) {
            engine_ring.return_book(place.take().expect("borrowed above"));
        }
    }
}
