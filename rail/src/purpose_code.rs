//! QR payload of a bank transfer (GOST R 56042-2014, `ST00012|Name=..|..`) and its purpose code.
//!
//! The code identifies the paid intent (D12). The purpose ends in `PAY-<payment id>`: unique, and
//! short enough to type by hand.

use crate::{Rub, account};

const HEADER: &str = "ST00012";
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

/// The QR payload. The standard requires the sum in kopecks.
pub fn payload(to: &Requisites, amount: Rub, purpose: &str, payment_id: &str) -> String {
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
    let mut fields = payload.split('|');
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
}
