//! `[alerts]`, and its variables without the prefix.

use std::ffi::OsString;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use toml::Table;

/// Variables without the prefix, and the settings in `[alerts]` that they set.
const ALERT_VARIABLES: [(&str, &str); 2] = [
    ("SLACK_WEBHOOK_URL", "slack_webhook_url"),
    ("PAGERDUTY_API_KEY", "pagerduty_api_key"),
];

/// Receivers of critical alerts besides the log. Their addresses and keys are secrets.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Alerts {
    /// An incoming webhook of Slack. Also set by the variable `SLACK_WEBHOOK_URL`.
    pub slack_webhook_url: Option<String>,
    /// An integration key of PagerDuty. Also set by the variable `PAGERDUTY_API_KEY`.
    pub pagerduty_api_key: Option<String>,
}

impl Alerts {
    /// The receivers for the payments gateway.
    pub fn sinks(&self) -> payments::AlertSinks {
        payments::AlertSinks::new(
            self.slack_webhook_url.clone(),
            self.pagerduty_api_key.clone(),
        )
    }

    /// Refuses an address to which no alert can be sent. The error does not contain it.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let slack = self.slack_webhook_url.as_deref().unwrap_or_default();
        let is_http = |url: reqwest::Url| matches!(url.scheme(), "http" | "https");
        anyhow::ensure!(
            slack.trim().is_empty() || reqwest::Url::parse(slack).is_ok_and(is_http),
            "configuration: alerts.slack_webhook_url is not an http(s) URL"
        );
        Ok(())
    }
}

/// Shows which receivers are set, not their secrets.
impl std::fmt::Debug for Alerts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.sinks(), f)
    }
}

/// Sets the receivers of alerts by their variables without the prefix. A blank variable is unset.
pub(super) fn set_alerts(
    settings: &mut Table,
    variable: impl Fn(&'static str) -> Option<OsString>,
) -> anyhow::Result<()> {
    for (name, setting) in ALERT_VARIABLES {
        let Some(text) = variable(name) else {
            continue;
        };
        let text = text.to_str();
        let text = text.with_context(|| format!("configuration: {name} is not UTF-8"))?;
        if text.trim().is_empty() {
            continue;
        }
        let alerts = settings
            .entry("alerts")
            .or_insert_with(|| Table::new().into());
        let alerts = alerts.as_table_mut();
        let alerts = alerts.context("configuration: alerts is not a table")?;
        alerts.insert(setting.into(), text.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, set};

    // rows: R022
    #[test]
    fn r022_receivers_of_alerts_are_settings_and_are_masked() {
        let key = "0123456789abcdef";
        let mut settings: Table = toml::from_str(
            "[alerts]\nslack_webhook_url = \"https://old.example/\"\npagerduty_api_key = \"k\"\n",
        )
        .expect("TOML");
        // The environment outranks the file; a blank variable is unset.
        let variables = |name: &str| match name {
            "SLACK_WEBHOOK_URL" => Some(OsString::from("https://hooks.example/T0/B0/secret")),
            _ => Some(OsString::from(" ")),
        };
        set_alerts(&mut settings, variables).expect("set");
        set(&mut settings, "alerts__pagerduty_api_key", key).expect("set");
        let config: Config = settings.try_into().expect("settings");
        let slack = config.alerts.slack_webhook_url.as_deref();
        assert_eq!(slack, Some("https://hooks.example/T0/B0/secret"));
        assert_eq!(config.alerts.pagerduty_api_key.as_deref(), Some(key));

        let expected = payments::AlertSinks::new(slack.map(str::to_owned), Some(key.to_owned()));
        assert!(config.alerts.sinks() == expected, "the receivers are used");
        assert!(Alerts::default().sinks() == payments::AlertSinks::default());

        let masked = config.masked().expect("shown");
        assert_eq!(masked["alerts"]["slack_webhook_url"].as_str(), Some("***"));
        for shown in [masked.to_string(), format!("{config:?}")] {
            assert!(!shown.contains("hooks.example"), "{shown}");
            assert!(!shown.contains(key), "{shown}");
        }
    }

    // rows: R022
    #[test]
    fn r022_a_receiver_of_digits_is_text() {
        for (text, expected) in [
            ("0123456789", "0123456789"),
            ("\"12\"", "12"),
            ("1e5", "1e5"),
        ] {
            let mut settings = Table::new();
            set(&mut settings, "alerts__pagerduty_api_key", text).expect("set");
            let config: Config = settings.try_into().expect("settings");
            let key = config.alerts.pagerduty_api_key.as_deref();
            assert_eq!(key, Some(expected));
        }
    }

    // rows: R022
    #[test]
    fn r022_slack_needs_an_http_address_and_the_refusal_does_not_show_it() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("platform.toml");
        let load = |url: &str| {
            let text = format!("[alerts]\nslack_webhook_url = \"{url}\"\n");
            std::fs::write(&file, text).expect("written");
            Config::load(Some(file.as_path()), Some(folder.path()))
        };
        for url in [
            "hooks.example/s3cret",
            "ftp://hooks.example/s3cret",
            "s3cret",
        ] {
            let error = format!("{:#}", load(url).expect_err(url));
            assert_eq!(
                error,
                "configuration: alerts.slack_webhook_url is not an http(s) URL"
            );
        }
        for url in ["https://hooks.example/T0", "http://127.0.0.1:1/", " "] {
            assert!(load(url).is_ok(), "{url}");
        }
    }
}
