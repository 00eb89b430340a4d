//! Compiles the contracts without protoc: protox parses the `.proto` files, tonic-prost-build
//! generates Rust.
//!
//! Reflection, JSON and the command line use the descriptor set.

use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=dfa");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let mut files = Vec::new();
    collect(PathBuf::from("dfa"), &mut files)?;
    files.sort();
    let mut compiler = protox::Compiler::new(["."])?;
    compiler.include_imports(true).include_source_info(true);
    for file in &files {
        compiler.open_file(file)?;
    }
    std::fs::write(
        out.join("descriptors.bin"),
        compiler.encode_file_descriptor_set(),
    )?;
    std::fs::write(out.join("sources.rs"), sources(&files)?)?;
    let mut config = tonic_prost_build::Config::new();
    // Checks are looked up by the message's name.
    config.enable_type_names();
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds_with_config(compiler.file_descriptor_set(), config)?;
    share_calls(&out)
}

/// Replaces tonic's calls, which are compiled per method, with those of `src/unary.rs`.
fn share_calls(out: &Path) -> Result<(), Box<dyn std::error::Error>> {
    for file in std::fs::read_dir(out)? {
        let file = file?.path();
        if file.extension().is_none_or(|ext| ext != "rs") {
            continue;
        }
        let shared = std::fs::read_to_string(&file)?
            .replace(
                "let mut grpc = tonic::server::Grpc::new(",
                "let grpc = crate::unary::Server::new(",
            )
            .replace(
                "self.inner.unary(req, path, codec)",
                "crate::unary::call(&mut self.inner, req, path, codec)",
            );
        if shared.contains("tonic::server::Grpc") || shared.contains(".inner.unary(") {
            return Err(format!("{}: tonic generates other calls", file.display()).into());
        }
        std::fs::write(&file, shared)?;
    }
    Ok(())
}

/// The schemas and the buf configuration as a Rust array of (path, content).
fn sources(schemas: &[PathBuf]) -> std::io::Result<String> {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let configuration = ["buf.yaml", "buf.gen.yaml"].map(PathBuf::from);
    let mut rows = String::new();
    for path in schemas.iter().chain(&configuration) {
        let file = root.join(path).canonicalize()?;
        rows += &format!("({path:?}, include_str!({file:?})),\n");
    }
    println!("cargo:rerun-if-changed=buf.yaml");
    println!("cargo:rerun-if-changed=buf.gen.yaml");
    Ok(format!("&[\n{rows}]\n"))
}

fn collect(dir: PathBuf, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(path, files)?;
        } else if path.extension().is_some_and(|ext| ext == "proto") {
            files.push(path);
        }
    }
    Ok(())
}
