//! Russian account numbers: 20 digits. The ninth is a control key over the bank's BIC and the
//! number (Bank of Russia rule, weights 7, 1, 3).
//!
//! Digits 1-5 are the balance account (408 = people, 407 = companies), 6-8 the currency (810 =
//! rouble), 9 the key, 10-20 branch and number.

/// BIC of the sandbox bank.
pub const BIC: &str = "044525999";

const RUBLE: &str = "810";
const KEY_AT: usize = 8;

/// Why a bank refuses an account number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccountError {
    #[error("account number must have 20 digits")]
    Length,
    #[error("account is not in roubles")]
    Currency,
    #[error("control key of the account number does not match")]
    ControlKey,
}

/// A valid account number of the sandbox bank: `number("40817", 42)` is that of a person.
///
/// # Panics
/// If `balance_account` is not five digits.
pub fn number(balance_account: &str, sequence: u32) -> String {
    assert!(balance_account.len() == 5 && balance_account.bytes().all(|b| b.is_ascii_digit()));
    let mut digits = format!("{balance_account}{RUBLE}0{sequence:011}").into_bytes();
    let key = (0..=9_u8)
        .find(|key| {
            digits[KEY_AT] = b'0' + key;
            weighted(&digits).is_multiple_of(10)
        })
        .expect("weight 3 of the key reaches every remainder of ten");
    digits[KEY_AT] = b'0' + key;
    String::from_utf8(digits).expect("digits are ASCII")
}

/// Checks length, currency and control key for the sandbox bank's BIC.
///
/// # Errors
/// [`AccountError`].
pub fn check(account: &str) -> Result<(), AccountError> {
    if account.len() != 20 || !account.bytes().all(|b| b.is_ascii_digit()) {
        return Err(AccountError::Length);
    }
    if &account[5..8] != RUBLE {
        return Err(AccountError::Currency);
    }
    if !weighted(account.as_bytes()).is_multiple_of(10) {
        return Err(AccountError::ControlKey);
    }
    Ok(())
}

/// The account with `*` in place of all but its last four characters.
pub fn masked(account: &str) -> String {
    let hidden = account.chars().count().saturating_sub(4);
    let shown = account.chars().skip(hidden);
    std::iter::repeat_n('*', hidden).chain(shown).collect()
}

/// Sum of the last three digits of the BIC and the account with repeating weights 7, 1, 3.
fn weighted(account: &[u8]) -> u32 {
    BIC.as_bytes()[6..]
        .iter()
        .chain(account)
        .zip([7, 1, 3].into_iter().cycle())
        .map(|(digit, weight)| u32::from(digit - b'0') * weight % 10)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_accounts_pass_and_any_other_key_fails() {
        for sequence in [0, 1, 42, u32::MAX] {
            let account = number("40817", sequence);
            assert_eq!(check(&account), Ok(()), "{account}");
            let key = account.as_bytes()[KEY_AT] - b'0';
            for other in (0..10).filter(|other| *other != key) {
                let mut wrong = account.clone().into_bytes();
                wrong[KEY_AT] = b'0' + other;
                let wrong = String::from_utf8(wrong).unwrap();
                assert_eq!(check(&wrong), Err(AccountError::ControlKey));
            }
        }
        assert_eq!(check("4081781000000000000"), Err(AccountError::Length));
        assert_eq!(check("4081781000000000000x"), Err(AccountError::Length));
        assert_eq!(check("40817840000000000001"), Err(AccountError::Currency));
    }

    #[test]
    fn a_masked_account_shows_its_last_four_digits() {
        assert_eq!(masked("40817810299910004312"), "****************4312");
        assert_eq!(masked(""), "");
    }
}
