//! The ledger's use of the URL of its store.

pub use events::StoreUrl;

/// The PostgreSQL URL, with its password.
///
/// # Errors
/// [`crate::Error::Url`]: another scheme.
pub(crate) fn postgres(url: &StoreUrl) -> Result<&str, crate::Error> {
    let postgres = url.postgres();
    postgres.ok_or_else(|| crate::Error::Url(url.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_selects_the_store_and_printed_settings_hide_the_password() {
        let text = r#"{"url": "postgres://ledger:pa55@db:5432/ledger"}"#;
        let config: crate::LedgerConfig = serde_json::from_str(text).unwrap();
        assert_eq!(
            postgres(&config.url).unwrap(),
            "postgres://ledger:pa55@db:5432/ledger"
        );
        assert!(!serde_json::to_string(&config).unwrap().contains("pa55"));
        assert!(!format!("{config:?}").contains("pa55"));
        assert!(crate::LedgerConfig::default().url.is_empty());
    }

    #[tokio::test]
    async fn unknown_url_schemes_are_refused() {
        let config = crate::LedgerConfig {
            url: StoreUrl::new("mysql://u:pa55@host/db"),
            ..crate::LedgerConfig::default()
        };
        let error = crate::repo::Store::open(&config).await.err().unwrap();
        assert_eq!(
            error.to_string(),
            "store url mysql://u:***@host/db: must be empty (SQLite) or begin with postgres://"
        );
    }
}
