//! What tests of several crates share. A dev-dependency only: no program that runs in production is built with it.

pub mod plans;
