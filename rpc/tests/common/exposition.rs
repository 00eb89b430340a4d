//! The Prometheus text format 0.0.4, as strictly as `promtool check metrics` reads it.

use std::collections::{BTreeMap, BTreeSet};

/// All series of one name.
#[derive(Debug, Default)]
pub struct Family {
    pub kind: String,
    /// By name and labels, as written.
    pub samples: BTreeMap<String, f64>,
}

type Labels = Vec<(String, String)>;

/// The families of a scrape by name.
///
/// # Errors
/// The first line that breaks a rule.
pub fn families(text: &str) -> Result<BTreeMap<String, Family>, String> {
    if !text.ends_with('\n') {
        return Err("the last line has no end".into());
    }
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let (mut current, mut described) = (String::new(), BTreeSet::new());
    let mut buckets = Buckets::default();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let wrong = |why: &str| Err(format!("{why}: {line}"));
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let Some((name, kind)) = rest.split_once(' ') else {
                return wrong("a TYPE without a type");
            };
            let kinds = ["counter", "gauge", "histogram", "summary", "untyped"];
            if !is_name(name, true) || !kinds.contains(&kind) {
                return wrong("not a name and a type");
            }
            let family = Family {
                kind: kind.to_owned(),
                ..Family::default()
            };
            if families.insert(name.to_owned(), family).is_some() {
                return wrong("a second TYPE");
            }
            name.clone_into(&mut current);
        } else if let Some(rest) = line.strip_prefix("# HELP ") {
            let name = rest.split(' ').next().unwrap_or_default();
            if !is_name(name, true) || !described.insert(name.to_owned()) {
                return wrong("not a name, or a second HELP");
            }
        } else if !line.starts_with('#') {
            let (name, labels, value) = sample(line)?;
            let Some(family) = families.get_mut(&current) else {
                return wrong("a sample before its TYPE");
            };
            let suffix = name.strip_prefix(current.as_str());
            let belongs = match family.kind.as_str() {
                "histogram" => matches!(suffix, Some("_bucket" | "_sum" | "_count")),
                "summary" => matches!(suffix, Some("" | "_sum" | "_count")),
                _ => suffix == Some(""),
            };
            if !belongs {
                return wrong("a sample outside its family");
            }
            if family.kind == "counter" && value < 0.0 {
                return wrong("a negative counter");
            }
            if family.kind == "histogram" {
                buckets.add(&name, &labels, value)?;
            }
            let (series, _) = line.rsplit_once(' ').expect("a sample has a value");
            if family.samples.insert(series.to_owned(), value).is_some() {
                return wrong("a second sample of one series");
            }
        }
    }
    buckets.check()?;
    Ok(families)
}

fn is_name(text: &str, colons: bool) -> bool {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_' || (colons && c == ':');
    let mut chars = text.chars();
    chars.next().is_some_and(is_first) && chars.all(|c| is_first(c) || c.is_ascii_digit())
}

/// Name, labels and value. This platform's metrics have no timestamps.
fn sample(line: &str) -> Result<(String, Labels, f64), String> {
    let wrong = |why: &str| Err(format!("{why}: {line}"));
    let end = line.find(['{', ' ']).unwrap_or(line.len());
    let (name, mut rest) = line.split_at(end);
    let mut labels = Labels::new();
    if let Some(mut inside) = rest.strip_prefix('{') {
        while !inside.starts_with('}') {
            let Some((label, quoted)) = inside.split_once("=\"") else {
                return wrong("a label without a value");
            };
            let Some((value, after)) = quoted_value(quoted) else {
                return wrong("a label's value without an end");
            };
            let is_new = labels.iter().all(|(known, _)| known != label);
            if !is_name(label, false) || !is_new {
                return wrong("not a label, or a second one");
            }
            labels.push((label.to_owned(), value));
            inside = after.strip_prefix(',').unwrap_or(after);
            if inside == after && !after.starts_with('}') {
                return wrong("no comma between labels");
            }
        }
        rest = &inside[1..];
    }
    let value = rest.strip_prefix(' ').and_then(|value| match value {
        "+Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        // Rust also parses words that the format does not have.
        number if number.contains(|c: char| c.is_ascii_digit()) => number.parse().ok(),
        _ => None,
    });
    match value {
        Some(value) if is_name(name, true) => Ok((name.to_owned(), labels, value)),
        _ => wrong("not a name and a value"),
    }
}

/// The value up to its closing quote, and the rest. `None`: no end or an unknown escape.
fn quoted_value(text: &str) -> Option<(String, &str)> {
    let (mut value, mut chars) = (String::new(), text.char_indices());
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                c @ ('\\' | '"') => value.push(c),
                _ => return None,
            },
            c => value.push(c),
        }
    }
    None
}

/// Parts of each histogram series.
#[derive(Default)]
struct Buckets(BTreeMap<(String, Labels), Parts>);

#[derive(Default)]
struct Parts {
    /// Upper bound and cumulative count, as written.
    buckets: Vec<(f64, f64)>,
    count: Option<f64>,
    has_sum: bool,
}

impl Buckets {
    fn add(&mut self, name: &str, labels: &Labels, value: f64) -> Result<(), String> {
        let (base, part) = name.rsplit_once('_').expect("a part of a histogram");
        let mut others = labels.clone();
        others.retain(|(label, _)| label != "le");
        let parts = self.0.entry((base.to_owned(), others)).or_default();
        match part {
            "sum" => parts.has_sum = true,
            "count" => parts.count = Some(value),
            _ => {
                let bound = labels.iter().find(|(label, _)| label == "le");
                let bound = match bound.map(|(_, bound)| bound.as_str()) {
                    Some("+Inf") => Some(f64::INFINITY),
                    Some(bound) => bound.parse().ok(),
                    None => None,
                };
                let bound = bound.ok_or_else(|| format!("a bucket of {name} without a bound"))?;
                parts.buckets.push((bound, value));
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        for ((name, labels), parts) in &self.0 {
            let rising = |pair: &[(f64, f64)]| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1;
            let all = parts.buckets.last().filter(|last| last.0.is_infinite());
            let is_whole = parts.has_sum
                && all.is_some_and(|all| Some(all.1) == parts.count)
                && parts.buckets.windows(2).all(rising);
            if !is_whole {
                return Err(format!("not a histogram: {name} {labels:?}"));
            }
        }
        Ok(())
    }
}
