//! Users of the demonstration: two investors and an issuer, with KYC level and bank accounts.

use anyhow::Context;
use serde_json::json;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::scenario::{Scenario, text};

/// The users and the bond they trade.
pub struct Participants {
    pub issuer: String,
    pub alice: String,
    pub bob: String,
    pub bob_account: String,
    pub bond: String,
    /// RFC 3339.
    pub matures_at: String,
}

impl Participants {
    /// Creates the users. The bond has a unique symbol, so the demonstration can run again on the
    /// same platform.
    pub async fn enter(scenario: &mut Scenario) -> anyhow::Result<Self> {
        let tag = uuid::Uuid::now_v7().simple().to_string()[20..].to_uppercase();
        let mut ids = Vec::new();
        let mut accounts = Vec::new();
        for name in ["issuer", "alice", "bob"] {
            let answer = scenario
                .call(
                    "sandbox.operator",
                    "dfa.identity.v1.IdentityService/CreateUser",
                    json!({ "kycStatus": "KYC_STATUS_STANDARD", "fullName": name }),
                )
                .await?;
            let user = text(&answer, "/profile/userId")?.to_owned();
            accounts.push(text(&answer, "/profile/bankAccount")?.to_owned());
            scenario.step(
                &format!("User {name} was created with KYC level STANDARD"),
                &[("user_id", &user)],
            );
            ids.push(user);
        }
        let mut ids = ids.into_iter();
        let mut next = || ids.next().context("three users");
        Ok(Self {
            issuer: next()?,
            alice: next()?,
            bob: next()?,
            bob_account: accounts.pop().context("three accounts")?,
            bond: format!("BOND-{tag}"),
            matures_at: (OffsetDateTime::now_utc() + time::Duration::days(365)).format(&Rfc3339)?,
        })
    }
}

/// The current time as RFC 3339.
pub fn now() -> String {
    OffsetDateTime::now_utc()
        .format(&Rfc3339)
        .expect("the current year has four digits")
}
