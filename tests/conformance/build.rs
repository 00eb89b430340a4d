//! Compiles the conformance service's schema, and its descriptors for the Connect layer under test.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true);
    for file in ["service", "server_compat"] {
        compiler.open_file(format!("connectrpc/conformance/v1/{file}.proto"))?;
    }
    std::fs::write(
        out.join("descriptors.bin"),
        compiler.encode_file_descriptor_set(),
    )?;
    let mut config = tonic_prost_build::Config::new();
    config.enable_type_names();
    tonic_prost_build::configure()
        .compile_fds_with_config(compiler.file_descriptor_set(), config)?;
    Ok(())
}
