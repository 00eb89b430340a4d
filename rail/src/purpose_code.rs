//! QR payload of a bank transfer (GOST R 56042-2014, `ST00012|Name=..|..`) and its purpose code.
//!
//! The code identifies the paid intent (D12). The purpose ends in `PAY-<payment id>`: unique, and
//! short enough to type by hand.

use crate::{Rub, account};

const HEADER: &str = "ST00012";
/// Separator of a payload's fields. The format has no escape for it.
const SEPARATOR: char = '|';
const CODE_PREFIX: &str = "PAY-";

/// Recipient of a bank transfer.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Requisites {
    pub name: String,
    pub account_number: String,
    pub bank_name: String,
    pub bic: String,
    pub correspondent_account: String,
}

impl Default for Requisites {
    /// Requisites of the sandbox bank.
    fn default() -> Self {
        Requisites {
            name: "ООО Платформа".into(),
            account_number: account::number("40702", 1),
            bank_name: "АО Банк-песочница".into(),
            bic: account::BIC.into(),
            correspondent_account: "30101810000000000000".into(),
        }
    }
}

/// Purpose code of an intent.
pub fn code(payment_id: &str) -> String {
    format!("{CODE_PREFIX}{payment_id}")
}

/// Payment id of the purpose code at the end of a text.
pub fn payment_id(text: &str) -> Option<&str> {
    let word = text.rsplit(' ').next()?;
    word.strip_prefix(CODE_PREFIX).filter(|id| !id.is_empty())
}

/// A value contains the separator, so that it would end early and begin another field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} contains `{SEPARATOR}`, which separates the fields of the QR payload; remove it")]
pub struct SeparatorInField {
    /// Name in the settings of the service: `requisites.bank_name`, `deposit_purpose`.
    field: &'static str,
}

/// Checks that a payload can carry these values.
///
/// # Errors
/// [`SeparatorInField`].
pub fn check(to: &Requisites, purpose: &str) -> Result<(), SeparatorInField> {
    let values: [(&'static str, &str); 6] = [
        ("requisites.name", &to.name),
        ("requisites.account_number", &to.account_number),
        ("requisites.bank_name", &to.bank_name),
        ("requisites.bic", &to.bic),
        (
            "requisites.correspondent_account",
            &to.correspondent_account,
        ),
        ("deposit_purpose", purpose),
    ];
    for (field, value) in values {
        if value.contains(SEPARATOR) {
            return Err(SeparatorInField { field });
        }
    }
    Ok(())
}

/// The QR payload. The standard requires the sum in kopecks.
///
/// # Panics
/// The values do not pass [`check`].
pub fn payload(to: &Requisites, amount: Rub, purpose: &str, payment_id: &str) -> String {
    assert_eq!(check(to, purpose), Ok(()));
    format!(
        "{HEADER}|Name={}|PersonalAcc={}|BankName={}|BIC={}|CorrespAcc={}|Sum={}|Purpose={purpose} {}",
        to.name,
        to.account_number,
        to.bank_name,
        to.bic,
        to.correspondent_account,
        amount.kopecks(),
        code(payment_id)
    )
}

/// Payment id and sum of a payload; `None` if the text is not a payload.
pub fn read(payload: &str) -> Option<(String, Rub)> {
    let mut fields = payload.split(SEPARATOR);
    if fields.next() != Some(HEADER) {
        return None;
    }
    let (mut id, mut sum) = (None, None);
    for field in fields {
        match field.split_once('=')? {
            ("Purpose", purpose) => id = payment_id(purpose).map(str::to_owned),
            ("Sum", kopecks) => sum = kopecks.parse().ok().map(Rub::from_kopecks),
            _ => {}
        }
    }
    Some((id?, sum?))
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R319
    #[test]
    fn r319_requisites_carry_the_sum_and_the_code() {
        let payload = payload(
            &Requisites::default(),
            Rub::from_kopecks(150_050),
            "Пополнение счёта",
            "0190-a",
        );
        assert!(payload.starts_with("ST00012|Name="));
        assert!(payload.contains("|Sum=150050|"));
        assert_eq!(
            read(&payload),
            Some(("0190-a".to_owned(), Rub::from_kopecks(150_050)))
        );
        assert_eq!(payment_id("PAY-0190-a"), Some("0190-a"));
        assert_eq!(payment_id("Пополнение PAY-"), None);
        assert_eq!(read("ST00011|Name=x"), None);
    }

    // rows: R319
    #[test]
    fn r319_a_value_with_the_separator_is_refused_and_any_other_is_read_unchanged() {
        let sum = Rub::from_kopecks(150_050);
        let own = Requisites {
            name: "ООО \"Ромашка = 1\"; Sum=7".into(),
            ..Requisites::default()
        };
        let purpose = "Top-up, Sum=7 PAY-0190-b";
        assert_eq!(check(&own, purpose), Ok(()));
        let written = payload(&own, sum, purpose, "0190-a");
        assert_eq!(written.split(SEPARATOR).count(), 8);
        assert_eq!(read(&written), Some(("0190-a".to_owned(), sum)));

        let broken: [(&str, fn(&mut Requisites) -> &mut String); 5] = [
            ("requisites.name", |to| &mut to.name),
            ("requisites.account_number", |to| &mut to.account_number),
            ("requisites.bank_name", |to| &mut to.bank_name),
            ("requisites.bic", |to| &mut to.bic),
            ("requisites.correspondent_account", |to| {
                &mut to.correspondent_account
            }),
        ];
        for (field, value) in broken {
            let mut to = Requisites::default();
            value(&mut to).push_str("|Sum=1");
            assert_eq!(check(&to, "Top-up"), Err(SeparatorInField { field }));
        }
        let refused = check(&Requisites::default(), "Top-up|Sum=1").unwrap_err();
        assert_eq!(
            refused.to_string(),
            "deposit_purpose contains `|`, which separates the fields of the QR payload; remove it"
        );
    }
}
