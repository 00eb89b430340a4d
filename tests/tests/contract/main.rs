//! Shared conventions of the contract (part A of the checklist and the gaps it decides), checked by
//! the descriptors and by real calls.

mod context;
mod emitters;
mod followed;
mod outside;
mod pages;
mod protocols;
mod registry;
mod rules;
mod schema;
mod values;
