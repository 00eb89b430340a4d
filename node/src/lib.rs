//! The one binary: configuration, wiring, command line, demonstration, replay, load. It decides nothing about money.

pub mod cli;
pub mod config;
pub mod demo;
mod load;
mod manifest;
pub mod platform;
pub mod proof;
mod rebuild;
pub mod replay;
mod run;
