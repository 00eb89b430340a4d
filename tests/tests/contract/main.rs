//! Shared conventions of the contract (part A of the checklist and the gaps it decides), checked by
//! the descriptors and by real calls.

mod context;
mod emitters;
mod every_service;
mod followed;
mod metrics;
mod outside;
mod pages;
mod protocols;
mod registry;
mod rules;
mod schema;
mod unfinished;
mod values;
