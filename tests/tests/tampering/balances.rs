//! Altered balances of the bank and of the embedded chain.

use serde_json::{Value, json};
use tests::call::AUDITOR;
use tests::process::Platform;
use tests::shared::run;
use tests::{number, text};

use crate::Store;

/// Bank and embedded chain stand in for outside systems, so their rows have no seals.
// rows: R188
#[test]
fn r188_altered_balances_of_the_bank_and_of_the_chain_are_named_by_the_proof() {
    run(async {
        let mut platform = Platform::start().await;
        let user = platform.rich("47.11").await;
        platform.rich("10.00").await;
        let request = json!({ "instrumentId": "CFA-RUB" });
        let money = platform.ok(AUDITOR, "cfa.GetInstrument", request).await;
        let token = text(&money, "/instrument/smartContractAddress");
        platform.proof().await;
        platform.stop().await;

        let bank = Store::open(&platform.data_dir(), "bank/bank.db");
        let altered = |by: &str| format!("UPDATE account SET balance_minor = balance_minor {by}");
        assert_eq!(bank.execute(&altered("+ 100")), 1);
        let found = difference(&mut platform, "BANK").await;
        assert_eq!(found["instrument_id"], json!("CFA-RUB"), "{found}");
        assert_eq!(bank.execute(&altered("- 100")), 1);

        // The low half of a holder's slot is the balance, the rest is zero (`CfaToken.sol`). No
        // other slot of the token has this number.
        let chain = Store::open(&platform.data_dir(), "chain/chain.sqlite");
        let token = token.trim_start_matches("0x");
        let altered = format!(
            "UPDATE slot SET value = x'{:064x}' WHERE address = x'{token}' AND value = x'{:064x}'",
            4_811, 4_711
        );
        assert_eq!(chain.execute(&altered), 1, "{altered}");
        let found = difference(&mut platform, "HOLDER").await;
        assert_eq!(
            (&found["instrument_id"], &found["holder"]),
            (&json!("CFA-RUB"), &json!(user.id)),
            "{found}"
        );
    });
}

/// Starts a stopped platform and takes its proof; returns the difference with this name, which must
/// be 1.00.
async fn difference(platform: &mut Platform, name: &str) -> Value {
    platform.restart().await;
    let proof = platform.full_proof().await;
    platform.stop().await;
    assert!(!proof.status.success(), "{proof:?}");
    let proof = proof.json();
    let mut differences = proof["differences"].as_array().into_iter().flatten();
    let found = differences.find(|one| one["name"] == json!(name));
    let found = found.unwrap_or_else(|| panic!("no {name}: {proof}"));
    let amount = number(&found["difference"]);
    assert_eq!(amount, number(&json!("1.00")), "{found}");
    found.clone()
}
