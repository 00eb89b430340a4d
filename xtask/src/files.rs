//! Source files of the workspace, without build output and generated folders.

use std::path::{Path, PathBuf};

/// Files below `root` with one of `extensions`, relative to it, sorted.
pub fn below(root: &Path, extensions: &[&str]) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() {
                if !name.starts_with('.') && !["target", "node_modules", "data"].contains(&&*name) {
                    folders.push(path);
                }
            } else if path
                .extension()
                .is_some_and(|ext| extensions.iter().any(|wanted| ext == *wanted))
            {
                found.push(path.strip_prefix(root)?.to_path_buf());
            }
        }
    }
    found.sort();
    Ok(found)
}
