//! Any bytes as a frame and as the first segment of a log.
#![no_main]

mod check_frames;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check_frames::check(bytes));
