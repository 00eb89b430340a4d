//! `platform`: the whole platform, and everything one does with it.

use std::process::ExitCode;

/// For the C libraries in this process too: a sixth of the ledger's processor time was the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // Before anything opens a connection: one crypto provider for the process.
    if rustls::crypto::ring::default_provider()
        .install_default()
        .is_err()
    {
        eprintln!("a TLS provider was installed before the platform started");
        return ExitCode::FAILURE;
    }
    node::cli::main()
}
