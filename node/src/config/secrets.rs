//! Settings and errors without the secrets that they may contain.

use toml::Value;

/// A path segment of a URL from this length on may be an access key.
const KEY_LENGTH_MIN: usize = 16;

/// Shown in place of a secret.
pub(super) const MASK: &str = "***";

/// Masks possible secrets in URLs: user, password, query, long path segments (access keys).
pub(super) fn mask(value: &mut Value) {
    match value {
        Value::Table(table) => table.iter_mut().for_each(|(_, value)| mask(value)),
        Value::Array(values) => values.iter_mut().for_each(mask),
        Value::String(text) if text.contains("://") => *text = masked_url(text),
        _ => {}
    }
}

fn masked_url(text: &str) -> String {
    let Ok(mut url) = reqwest::Url::parse(text) else {
        return MASK.to_owned();
    };
    if url.password().is_some() {
        let _ = url.set_password(Some(MASK));
    } else if !url.username().is_empty() {
        let _ = url.set_username(MASK);
    }
    if url.query().is_some() {
        url.set_query(Some(MASK));
    }
    let is_key = |segment: &str| segment.len() >= KEY_LENGTH_MIN;
    if url.path().split('/').any(is_key) {
        let shown = |segment| if is_key(segment) { MASK } else { segment };
        let path: Vec<&str> = url.path().split('/').map(shown).collect();
        url.set_path(&path.join("/"));
    }
    url.to_string()
}

/// The message of `error` without the refused value, which may be a secret.
fn without_value(error: &toml::de::Error) -> String {
    let message = error.message();
    for kind in ["invalid type", "invalid value"] {
        if message.starts_with(&format!("{kind}: ")) {
            let expected = message.rfind(", expected ").map(|at| &message[at..]);
            return format!("{kind}{}", expected.unwrap_or_default());
        }
    }
    message.to_owned()
}

/// An error in the file `text`, without the source line, which may contain a secret.
pub(super) fn located(text: &str, error: &toml::de::Error) -> anyhow::Error {
    let message = without_value(error);
    let before = error.span().and_then(|span| text.get(..span.start));
    let Some(before) = before else {
        return anyhow::Error::msg(message);
    };
    let line = before.matches('\n').count() + 1;
    let last = before.rsplit('\n').next().unwrap_or_default();
    let column = last.chars().count() + 1;
    anyhow::anyhow!("line {line}, column {column}: {message}")
}

/// An error in the merged settings. It names the setting and does not contain its value.
pub(super) fn merged(error: &toml::de::Error) -> anyhow::Error {
    let shown = error.to_string();
    let shown = shown.replacen(error.message(), &without_value(error), 1);
    anyhow::Error::msg(shown.trim_end().replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use toml::Table;

    use super::*;
    use crate::config::{Config, set};

    #[test]
    fn passwords_and_keys_in_urls_are_masked_for_display() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        let text = "[ledger]\nurl = \"postgres://platform:s3cret@db/ledger?sslkey=k\"\n";
        std::fs::write(&file, text).expect("written");
        let config = Config::load(Some(file.as_path()), Some(folder.path())).expect("loaded");
        let shown = config.masked().expect("shown").to_string();
        assert!(
            shown.contains("postgres://platform:***@db/ledger"),
            "{shown}"
        );
        assert!(!shown.contains("s3cret"), "{shown}");
        for (url, shown) in [
            (
                "https://node.example/v3/0123456789abcdef",
                "https://node.example/v3/***",
            ),
            ("https://token@node.example/", "https://***@node.example/"),
            (
                "http://127.0.0.1:8083/webhook",
                "http://127.0.0.1:8083/webhook",
            ),
            ("postgres://a:b/c?d@host:x", "***"),
        ] {
            assert_eq!(masked_url(url), shown);
        }
    }

    #[test]
    fn an_error_in_a_file_has_its_position_and_no_secret() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        for (text, position, expected) in [
            (
                "[alerts]\nslack_url = \"4711\"\n",
                Some((2, 1)),
                "slack_url",
            ),
            (
                "[alerts]\npagerduty_api_key = \"4711\n[log]\n",
                None,
                "string",
            ),
            (
                "[alerts]\npagerduty_api_key = 4711\n",
                Some((2, 21)),
                "invalid type, expected a string",
            ),
            (
                "alerts = { pagerduty_api_key = 4711 }\n",
                Some((1, 32)),
                "string",
            ),
            ("# Ключ\nalerts = \"4711\"\n", Some((2, 10)), "invalid type"),
            (
                "[ledger]\nurls = \"postgres://a:4711@db\"\n",
                Some((2, 1)),
                "urls",
            ),
            (
                "[ledger]\nurl = \"postgres://a:4711@db\n[log]\n",
                None,
                "string",
            ),
            (
                "ledger = \"postgres://a:4711@db\"\n",
                Some((1, 10)),
                "invalid type",
            ),
        ] {
            std::fs::write(&file, text).expect("written");
            let error = Config::load(Some(file.as_path()), None).expect_err(text);
            let shown = format!("{error:#} {error:?}");
            // The file's path may contain the digits.
            let shown = shown.replace(&file.display().to_string(), "");
            assert!(!shown.contains("4711"), "{shown}");
            assert!(shown.contains(expected), "{shown}");
            let by_toml = toml::from_str::<Config>(text).expect_err(text).to_string();
            let by_toml = by_toml.lines().next().expect("a line");
            let place = by_toml
                .strip_prefix("TOML parse error at ")
                .expect("a place");
            assert!(shown.contains(&format!(": {place}: ")), "{place}: {shown}");
            if let Some((line, column)) = position {
                assert_eq!(place, format!("line {line}, column {column}"), "{text}");
            }
        }
    }

    #[test]
    fn an_error_in_the_environment_names_the_setting_and_has_no_secret() {
        let mut settings = Table::new();
        let text = "{ pagerduty_api_key = 4711 }";
        set(&mut settings, "alerts", text).expect("set");
        let error = settings.try_into::<Config>().expect_err("a number");
        let shown = merged(&error).to_string();
        assert!(!shown.contains("4711"), "{shown}");
        assert!(shown.contains("invalid type, expected a string"), "{shown}");
        assert!(shown.contains("pagerduty_api_key"), "{shown}");
    }
}
