//! Conventions that all services of the contract share (part A of the checklist and its decisions),
//! checked on the descriptors and by real calls.

mod approvals;
mod context;
mod emitters;
mod every_service;
mod followed;
mod metrics;
mod money;
mod outside;
mod pages;
mod protocols;
mod registry;
mod rules;
mod schema;
mod unfinished;
mod values;
mod versions;
