//! Compiles the contracts without protoc: protox parses the `.proto` files, tonic-prost-build
//! generates Rust.
//!
//! Reflection, JSON and the command line use the descriptor set.

use std::path::PathBuf;

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
    let mut config = prost_build::Config::new();
    // Checks are looked up by the message's name.
    config.enable_type_names().bytes(["."]);
    let tonic = tonic_prost_build::configure().codec_path("crate::unary::BytesCodec");
    config.service_generator(Box::new(SharedCalls(tonic.service_generator())));
    config.compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}

/// Replaces tonic's calls, which are compiled per method, with those of `src/unary.rs`. A call that
/// is missed here does not compile with the codec of bytes.
struct SharedCalls(Box<dyn prost_build::ServiceGenerator>);

impl prost_build::ServiceGenerator for SharedCalls {
    fn generate(&mut self, service: prost_build::Service, code: &mut String) {
        let start = code.len();
        self.0.generate(service, code);
        let generated = code.split_off(start);
        *code += &generated
            .replace(
                "grpc.unary(method, req)",
                "crate::unary::answer(&mut grpc, method, req)",
            )
            .replace(
                "self.inner.unary(req, path, codec)",
                "crate::unary::call(&mut self.inner, req, path, codec)",
            );
    }
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
