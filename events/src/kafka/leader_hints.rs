//! Switches off librdkafka's use of leader hints (KIP-951), which can crash the process.
//!
//! Fetch and produce responses name the new leaders of partitions that moved. For a partition
//! without a leader in a fetch response librdkafka counts an entry but does not fill it, and its
//! main thread then reads memory at a random index (confluentinc/librdkafka issue 5280): a broker
//! that restarts with several partitions can end this process. Without hints the client requests
//! the metadata, as it does after each such error anyway.

use std::ffi::{c_int, c_void};

/// librdkafka's `RD_KAFKA_OP_RES_HANDLED`: the caller frees the update.
const HANDLED: c_int = 1;

/// Replaces `rd_kafka_metadata_update_op`: the linker's `--wrap` (`.cargo/config.toml`) directs
/// librdkafka's call here. Only the attribute is `unsafe`; it sets the symbol's name.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
extern "C" fn __wrap_rd_kafka_metadata_update_op(
    _client: *mut c_void,
    _update: *mut c_void,
) -> c_int {
    HANDLED
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[allow(unsafe_code)]
    unsafe extern "C" {
        safe fn rd_kafka_metadata_update_op(client: *mut c_void, update: *mut c_void) -> c_int;
    }

    #[test]
    fn the_linker_directs_the_call_here() {
        assert_eq!(
            rd_kafka_metadata_update_op as *const () as usize,
            __wrap_rd_kafka_metadata_update_op as *const () as usize,
            "built without the linker options of .cargo/config.toml (RUSTFLAGS replaces them)"
        );
    }
}
