//! Room `settlement`: reads the journal and drives each trade's delivery against payment through ledger and chain.
//!
//! | file | what |
//! |---|---|
//! | `fold` | the journal folded into pools, open orders and what they reserve |
//! | `carve` | orders' own holds: split, paid from, given back; the invariant |
//! | `plan` | what one ledger transaction does |
//! | `batch` | the settler: records in, sealed batches out |
//! | `saga` | the life of a sealed batch, step by step |
//! | `ids` | derived ids and names |
//!
//! These are pure.
pub mod batch;
pub mod carve;
pub mod fold;
pub mod ids;
pub mod plan;
pub mod saga;
