//! Every SQL file in a migrations folder of the workspace is named in its crate's code. A file that
//! is not named is never applied.

use std::{
    fs,
    path::{Path, PathBuf},
};

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found
}

#[test]
fn every_migration_is_applied() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace");
    let mut seen = 0;
    for entry in fs::read_dir(workspace).expect("readable") {
        let folder = entry.expect("readable").path();
        let migrations = files(&folder.join("migrations"), "sql");
        if migrations.is_empty() {
            continue;
        }
        let code: String = files(&folder.join("src"), "rs")
            .iter()
            .map(|file| fs::read_to_string(file).expect("readable"))
            .collect();
        for file in migrations {
            let name = file
                .file_stem()
                .and_then(|name| name.to_str())
                .expect("UTF-8");
            assert!(
                code.contains(&format!("\"{name}\"")),
                "{} is not applied",
                file.display()
            );
            seen += 1;
        }
    }
    assert!(seen >= 20, "only {seen} migrations were found");
}
