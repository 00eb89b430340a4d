//! Any bytes as the payload of a command and of an event.
#![no_main]

mod check_commands;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    check_commands::check(bytes);
});
