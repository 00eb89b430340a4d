//! `platform`: the whole platform and its command line.

use std::process::ExitCode;

/// Also allocates for the C libraries in this process. The system allocator took a sixth of the
/// ledger's CPU time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // One TLS crypto provider per process, installed before any connection.
    if rustls::crypto::ring::default_provider()
        .install_default()
        .is_err()
    {
        eprintln!("a TLS provider was installed before the platform started");
        return ExitCode::FAILURE;
    }
    node::cli::main()
}
