//! Admission: pre-trade checks of who may order, and with which money. Has no I/O and no clock.
//!
//! Checks and state changes are separate. `admit` reads the state and turns a [`Request`] into a
//! [`Command`](types::Command) that carries everything its effect depends on (slot, draw,
//! protection price), or into a [`Reject`]. Only `apply_command` and `apply_event` change the
//! state. So a replay of the journal produces the same state, however the events of different
//! instruments interleave.
//!
//! | file | content |
//! |---|---|
//! | `request` | requests and refusals |
//! | `admission` | `Admission`: state, indexes, caches |
//! | `state` | tables folded from the journal: orders, holds, sessions, users |
//! | `orders` | checks of client requests: new, cancel, amend, mass cancel |
//! | `budget` | the value that each user may order per day |
//! | `control` | checks of all other requests: binding, funding, phases, blocks |
//! | `clock` | whether the machine's clock is suspect, as journalled |
//! | `fold_command`, `fold_event` | the two ways in which the state changes |
//! | `report` | the numbered messages of sessions that follow from both |
//! | `slots` | free slots of the order table |
//! | `client_ids` | open orders by client order id |
//! | `default_holds` | trading holds by user |
//! | `counts` | open orders per user and instrument |
//! | `session_set` | sessions with trades that are not final |
//! | `order_lists` | the open orders of each user and session |
//! | `sweeps` | commands that end many orders of a member, and their slices |
//! | `view` | totals, lookups, state hash, snapshot, invariants |
//!
//! The book checks phase, band and post-only (D13), not admission: an order that fails them exists,
//! as REJECTED. Money invariant, per hold: `undrawn + sum of reserves of open orders = what the
//! ledger holds for it` (`design.md` 4).
#![no_std]

extern crate alloc;

mod admission;
mod bounds;
mod budget;
mod client_ids;
mod clock;
mod control;
mod counts;
mod default_holds;
mod fold_command;
mod fold_event;
mod order_lists;
mod orders;
mod report;
mod request;
mod session_set;
mod slots;
mod state;
mod sweeps;
mod view;

pub use admission::{Admission, AdmissionConfig, KEY_LIFETIME_NS, moscow_day};
pub use bounds::Rates;
pub use budget::{Budget, OrderBudget};
pub use clock::ClockState;
pub use fold_event::{Effect, Effects};
pub use report::{Report, ReportBody, ReportSink};
pub use request::{
    AmendRequest, CancelAllAfterRequest, CancelRequest, FundRequest, MassCancelRequest, NewRequest,
    OrderRef, Reject, RejectDetails, Request, RequestName, SessionRequest,
};
pub use state::{
    AdmissionImage, Blocks, BoundsRow, HoldBalance, Instrument, KeyedCall, OpenOrder, Session,
    Settlement, Unsettled, User,
};
pub use sweeps::SliceBound;
pub use view::HoldTotals;
