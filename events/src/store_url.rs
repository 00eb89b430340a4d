//! URL of the store. Its printed form hides the password.

use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

/// Database URL. `Display`, `Debug` and the printed configuration show the password as `***`.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct StoreUrl(String);

impl StoreUrl {
    pub fn new(url: impl Into<String>) -> Self {
        StoreUrl(url.into())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The PostgreSQL URL, with its password. `None` for another scheme.
    pub fn postgres(&self) -> Option<&str> {
        let is_ours = ["postgres://", "postgresql://"]
            .iter()
            .any(|scheme| self.0.starts_with(scheme));
        is_ours.then_some(self.0.as_str())
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Parameters may contain secrets too, and a password may contain a question mark.
        let shown = self.0.split('?').next().unwrap_or_default();
        if self.0.rfind('@').is_some_and(|at| at > shown.len()) {
            return f.write_str("***");
        }
        let Some((scheme, rest)) = shown.split_once("://") else {
            return f.write_str(if shown.is_empty() { "" } else { "***" });
        };
        // A password may contain `@`: the last `@` ends it.
        match rest.rsplit_once('@') {
            Some((login, host)) => {
                let user = login.split(':').next().unwrap_or_default();
                let password = if login.contains(':') { ":***" } else { "" };
                write!(f, "{scheme}://{user}{password}@{host}")
            }
            None => write!(f, "{scheme}://{rest}"),
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

impl Serialize for StoreUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_never_printed() {
        for (url, shown) in [
            ("", ""),
            ("postgres://u:p@host:1/db", "postgres://u:***@host:1/db"),
            (
                "postgres://u:p@ss:x@host/db?password=p",
                "postgres://u:***@host/db",
            ),
            ("postgres://host/db", "postgres://host/db"),
            ("secret", "***"),
        ] {
            let url = StoreUrl::new(url);
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), format!("{shown:?}"));
            assert_eq!(serde_json::to_value(&url).unwrap(), shown);
        }
    }
}
