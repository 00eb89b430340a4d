//! Versions and deprecation of the contract (ARCHITECTURE.md, "Compatibility of the contracts").

use std::collections::BTreeSet;

use prost_reflect::{DescriptorPool, FileDescriptor};
use tests::wire::pool;

/// A message, field, enumeration, enumeration value, service or method.
struct Element {
    name: String,
    comment: String,
    is_deprecated: bool,
}

impl Element {
    fn new(name: &str, file: &FileDescriptor, path: &[i32], is_deprecated: Option<bool>) -> Self {
        let info = file.file_descriptor_proto().source_code_info.as_ref();
        let mut locations = info.into_iter().flat_map(|info| &info.location);
        let location = locations.find(|location| location.path == path);
        let comment = location.and_then(|location| location.leading_comments.clone());
        Self {
            name: name.to_owned(),
            comment: comment.unwrap_or_default(),
            is_deprecated: is_deprecated.unwrap_or_default(),
        }
    }
}

/// Every element of the platform's contract.
fn elements(pool: &DescriptorPool) -> Vec<Element> {
    let mut found = Vec::new();
    macro_rules! add {
        ($one:expr, $proto:ident) => {
            let one = &$one;
            let options = one.$proto().options.as_ref();
            let is_deprecated = options.and_then(|options| options.deprecated);
            let file = one.parent_file();
            found.push(Element::new(
                one.full_name(),
                &file,
                one.path(),
                is_deprecated,
            ));
        };
    }
    for message in pool.all_messages() {
        for field in message.fields() {
            add!(field, field_descriptor_proto);
        }
        add!(message, descriptor_proto);
    }
    for values in pool.all_enums() {
        for value in values.values() {
            add!(value, enum_value_descriptor_proto);
        }
        add!(values, enum_descriptor_proto);
    }
    for service in pool.services() {
        for method in service.methods() {
            add!(method, method_descriptor_proto);
        }
        add!(service, service_descriptor_proto);
    }
    found.retain(|element| element.name.starts_with("dfa."));
    found
}

/// Deprecated elements without an existing replacement in their comment, or without a line in the
/// changelog.
fn unannounced(pool: &DescriptorPool, changelog: &str) -> Vec<String> {
    let elements = elements(pool);
    let names: BTreeSet<&str> = elements.iter().map(|element| &*element.name).collect();
    let mut faults = Vec::new();
    for element in elements.iter().filter(|element| element.is_deprecated) {
        let words: Vec<&str> = element.comment.split_whitespace().collect();
        let comment = words.join(" ");
        let after = comment.split_once("Deprecated: use `");
        let replacement = after.and_then(|(_, rest)| Some(rest.split_once('`')?.0));
        let (scope, _) = element.name.rsplit_once('.').expect("a package");
        let exists = |name: &str| {
            let sibling = format!("{scope}.{name}");
            names.contains(name) || names.contains(&*sibling)
        };
        if !replacement.is_some_and(exists) {
            faults.push(format!("{}: no replacement", element.name));
        }
        if !changelog.contains(&format!("`{}`", element.name)) {
            faults.push(format!("{}: not in the changelog", element.name));
        }
    }
    faults
}

/// The contract with `Money.currency_code` deprecated under this comment.
fn with_deprecated_field(comment: Option<&str>) -> DescriptorPool {
    let mut files = pool().file_descriptor_protos().cloned().collect::<Vec<_>>();
    let file = files
        .iter_mut()
        .find(|file| file.package() == "dfa.common.v1")
        .expect("common");
    let mut messages = file.message_type.iter_mut().enumerate();
    let (at, message) = messages
        .find(|(_, message)| message.name() == "Money")
        .expect("Money");
    let mut fields = message.field.iter_mut().enumerate();
    let (field_at, field) = fields
        .find(|(_, field)| field.name() == "currency_code")
        .expect("a field");
    field
        .options
        .get_or_insert_with(Default::default)
        .deprecated = Some(true);
    // Field numbers of FileDescriptorProto.message_type and DescriptorProto.field.
    let path = [4, index(at), 2, index(field_at)];
    let info = file.source_code_info.as_mut().expect("comments");
    let location = info.location.iter_mut().find(|one| one.path == path);
    location.expect("a field has a location").leading_comments = comment.map(str::to_owned);
    let mut changed = DescriptorPool::new();
    changed
        .add_file_descriptor_protos(files)
        .expect("the same contract");
    changed
}

fn index(at: usize) -> i32 {
    i32::try_from(at).expect("small")
}

fn read(path: &str) -> String {
    let path = format!("{}/../{path}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

// rows: R342
#[test]
fn r342_each_package_has_a_version_that_is_its_folder_and_part_of_each_calls_path() {
    let pool = pool();
    let mut packages = BTreeSet::new();
    for file in pool.files() {
        let package = file.package_name();
        if !package.starts_with("dfa.") {
            continue;
        }
        packages.insert(package.to_owned());
        let version = package.rsplit_once(".v").map(|(_, version)| version);
        let number = version.and_then(|version| version.parse::<u32>().ok());
        assert!(number.is_some_and(|number| number > 0), "{package}");
        let folder = package.replace('.', "/");
        let (place, _) = file.name().rsplit_once('/').expect("a folder");
        assert_eq!(place, folder);
        let options = file.file_descriptor_proto().options.clone();
        let options = options.unwrap_or_default();
        assert!(options.go_package().starts_with(&folder), "{options:?}");
        assert_eq!(options.java_package(), package);
        for service in file.services() {
            let prefix = format!("{package}.");
            assert!(service.full_name().starts_with(&prefix), "{prefix}");
        }
    }
    assert!(packages.len() > 5, "{packages:?}");
}

// rows: R342
#[test]
fn r342_each_deprecated_element_names_its_replacement_and_is_in_the_changelog() {
    let none: [&str; 0] = [];
    assert_eq!(unannounced(&pool(), &read("CHANGELOG.md")), none);

    // The check detects what is missing.
    let announced = "- `dfa.common.v1.Money.currency_code` is deprecated.";
    let missing = "dfa.common.v1.Money.currency_code: no replacement";
    for (comment, changelog, faults) in [
        (
            Some("The unit. Deprecated: use `amount`."),
            announced,
            &none[..],
        ),
        (
            Some("Deprecated: use `dfa.common.v1.Decimal.value`."),
            announced,
            &none[..],
        ),
        (
            Some("Deprecated: use `nothing`."),
            announced,
            &[missing][..],
        ),
        (Some("Deprecated."), announced, &[missing][..]),
        (
            None,
            "",
            &[
                missing,
                "dfa.common.v1.Money.currency_code: not in the changelog",
            ][..],
        ),
    ] {
        let pool = with_deprecated_field(comment);
        assert_eq!(unannounced(&pool, changelog), faults, "{comment:?}");
    }
}

// rows: R342 R017
#[test]
fn r342_the_policy_is_written_down_and_its_gate_runs() {
    let policy = read("ARCHITECTURE.md");
    let policy = policy.split_once("\n## Compatibility of the contracts\n");
    let (_, policy) = policy.expect("a section");
    let policy = policy.split("\n## ").next().unwrap_or_default();
    for word in [
        "deprecated = true",
        "`v2`",
        "12 months",
        "CHANGELOG.md",
        "proto check",
    ] {
        assert!(policy.contains(word), "the policy says nothing of {word}");
    }
    let gate = read("proto/buf.yaml");
    let (_, gate) = gate.split_once("breaking:").expect("a gate");
    assert!(gate.contains("- FILE"), "{gate}");
    let steps = read(".ci/run");
    assert!(
        steps
            .lines()
            .any(|line| line.ends_with("cargo xtask proto check")),
        "{steps}"
    );
}
