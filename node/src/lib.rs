//! The platform binary: configuration, wiring, command line, demo, replay, load. It contains no
//! money logic.

pub mod check;
pub mod cli;
pub mod config;
pub mod demo;
mod disk;
mod load;
mod manifest;
pub mod platform;
pub mod proof;
mod rebuild;
pub mod replay;
mod run;
