//! Shared types of all crates.
//!
//! Money, price and quantity are integers with checked arithmetic; ids are types; a request is a
//! [`Command`], its result an [`Event`]. No clock, no allocation on the hot path, no floats.
//!
//! | file | contents |
//! |---|---|
//! | `decimal` | exact decimal numbers of the contracts |
//! | `number` | `Ticks`, `Lots`, `Minor`, `FeeRate`: integers of the trading path |
//! | `text` | `InstrumentId`, `UserId`: short ids stored inline |
//! | `ids` | dense indices, order handles, sequence numbers, 128-bit ids |
//! | `derived` | ids that are pure functions of other ids and names |
//! | `codes` | macro for enumerations with codes and names |
//! | `operation` | types and states of operations, holds, payments, limits |
//! | `day` | the business day |
//! | `order` | side, type, time in force, self-trade mode, order status, phase |
//! | `reason` | reasons of cancels and rejects |
//! | `instrument` | trading parameters of an instrument |
//! | `money` | `Amount`; `reserve`, `fee`: the two money formulas of an order |
//! | `command`, `event` | the two kinds of journal record |
//! | `hash` | the hash function for state hashes |
//! | `subaccount` | ids of the ledger's sub-accounts |
//! | `address` | the on-chain address of a user |
#![no_std]

extern crate alloc;

pub mod address;
mod codes;
pub mod command;
pub mod day;
pub mod decimal;
pub mod derived;
pub mod event;
pub mod hash;
pub mod ids;
pub mod instrument;
pub mod money;
pub mod number;
pub mod operation;
pub mod order;
pub mod reason;
pub mod subaccount;
pub mod text;

pub use command::{Command, Envelope, Route};
pub use day::BusinessDay;
pub use decimal::{Decimal, DecimalError, Rounding};
pub use derived::{HoldPart, child_uuid, order_hold, order_uuid, trade_uuid};
pub use event::{Event, EventEnvelope, Quote};
pub use hash::StateHasher;
pub use ids::{
    AssetIx, Handle, HoldIx, Id128, InstrumentIx, NodeId, Sequence, SessionIx, StpGroup, UserIx,
};
pub use instrument::{InstrumentParams, InstrumentSpec, SpecError, Terms, VelocityRule};
pub use money::{Amount, FillTotals, MoneyError, Reserve, fee, reserve};
pub use number::{FeeRate, Lots, Minor, Ticks};
pub use operation::{HoldStatus, LimitType, OperationStatus, OperationType, PaymentStatus};
pub use order::{HoldKind, OrderStatus, OrderType, Phase, PhaseCause, Side, StpMode, TimeInForce};
pub use reason::{CancelReason, RejectReason};
pub use subaccount::{CFA_RUB, SYSTEM_USER};
pub use text::{InstrumentId, TextError, UserId};
