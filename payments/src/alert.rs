//! Sinks of critical alerts besides the log: Slack and PagerDuty (specification 5.7, R022).
//!
//! The settings `[alerts]` or environment variables name the receivers. Alerts are events of the
//! payments topic. A consumer delivers them at least once and retries while a receiver is
//! unavailable. Without a receiver the log is the only sink. The receivers are secrets and are
//! never printed.

use std::{fmt, time::Duration};

use serde_json::json;

pub const SLACK_VARIABLE: &str = "SLACK_WEBHOOK_URL";
pub const PAGERDUTY_VARIABLE: &str = "PAGERDUTY_API_KEY";

const PAGERDUTY_URL: &str = "https://events.pagerduty.com/v2/enqueue";
const TIMEOUT_MS: u64 = 10_000;

/// The configured receivers.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct AlertSinks {
    slack_url: Option<String>,
    pagerduty_key: Option<String>,
    pagerduty_url: Option<String>,
}

/// Shows which receivers are set, not their secrets.
impl fmt::Debug for AlertSinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlertSinks")
            .field("slack", &self.slack_url.is_some())
            .field("pagerduty", &self.pagerduty_key.is_some())
            .finish()
    }
}

impl AlertSinks {
    /// Reads the receivers with `variable`, which returns the value of a name.
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> AlertSinks {
        let non_blank = |name| variable(name).filter(|value| !value.trim().is_empty());
        AlertSinks {
            slack_url: non_blank(SLACK_VARIABLE),
            pagerduty_key: non_blank(PAGERDUTY_VARIABLE),
            pagerduty_url: None,
        }
    }

    /// Replaces PagerDuty's address, for a proxy or a test double.
    pub fn with_pagerduty_url(mut self, url: &str) -> AlertSinks {
        self.pagerduty_url = Some(url.to_owned());
        self
    }

    /// Delivers to every receiver; an error if one of them does not accept the alert.
    pub(crate) async fn send(&self, report_id: &str, text: &str) -> Result<(), reqwest::Error> {
        if self.slack_url.is_none() && self.pagerduty_key.is_none() {
            return Ok(());
        }
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .timeout(Duration::from_millis(TIMEOUT_MS))
            .build()?;
        let mut deliveries = Vec::new();
        if let Some(url) = &self.slack_url {
            let body = json!({ "text": format!(":rotating_light: CRITICAL {text}") });
            deliveries.push(http.post(url).json(&body));
        }
        if let Some(key) = &self.pagerduty_key {
            let url = self.pagerduty_url.as_deref().unwrap_or(PAGERDUTY_URL);
            let body = json!({
                "routing_key": key,
                "event_action": "trigger",
                "dedup_key": report_id,
                "payload": { "summary": text, "severity": "critical", "source": "payments" },
            });
            deliveries.push(http.post(url).json(&body));
        }
        for delivery in deliveries {
            let answer = delivery.send().await.map_err(reqwest::Error::without_url)?;
            answer
                .error_for_status()
                .map_err(reqwest::Error::without_url)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R022
    #[test]
    fn r022_receivers_come_from_the_environment_and_are_not_printed() {
        let none = AlertSinks::from_env(|_| None);
        assert_eq!(none, AlertSinks::default());
        let empty = AlertSinks::from_env(|_| Some(" ".into()));
        assert_eq!(empty, AlertSinks::default());
        let both = AlertSinks::from_env(|name| Some(format!("secret of {name}")));
        assert_eq!(
            both.slack_url.as_deref(),
            Some("secret of SLACK_WEBHOOK_URL")
        );
        assert_eq!(
            both.pagerduty_key.as_deref(),
            Some("secret of PAGERDUTY_API_KEY")
        );
        assert!(!format!("{both:?}").contains("secret"));
    }
}
