//! Rows that neither the demonstration nor the load makes: a placement, freezes, an extract from
//! the register, a suspended deposit, a bust trade with its case, a limit, and records of acts.
//!
//! Nothing is due after the folder is packed, so that a later start changes nothing: the placement
//! is closed, no intent is unpaid, and no request waits for its approval.
//!
//! Not made: payments of coupons, which follow the end of a day; differences between chain and
//! ledger, and stuck batches, which need a fault.

use anyhow::ensure;
use serde_json::{Value, json};

use super::{Made, investor, text};
use crate::shell;

const OPERATOR: &str = "sandbox.operator";
const COMPLIANCE: &str = "sandbox.compliance";
const SUPERVISOR: &str = "sandbox.market-supervisor";
const SERVICE: &str = "sandbox.service";
/// Two persons: one requests, one approves.
const ANNA: &str = "sandbox.operator+compliance+market-supervisor.anna";
const BORIS: &str = "sandbox.operator+compliance+market-supervisor.boris";

/// The placed issue.
const ISSUE: &str = "PLACED-ISSUE";
/// End of the placement, from its registration: after activation and subscription.
const CLOSES: &str = "20 seconds";
/// Roubles per unit, in the placement and of the bust trade.
const PRICE: &str = "1000.00";

/// Reads of these rows. No retention removes what they list.
pub const READS: [&[&str]; 10] = [
    &["enforcement", "list"],
    &["subscription", "list", "--instrument-id", ISSUE],
    &["holders", "list", "--instrument-id", ISSUE],
    &["cfa", "suspended"],
    &["settle", "cases"],
    &["limit", "list"],
    &["approval", "list"],
    &["market", "audit"],
    &["ledger", "audit"],
    &["settle", "audit"],
];

impl Made<'_> {
    /// Makes the rows; returns the extract's id.
    pub(super) fn make_rows(&self) -> anyhow::Result<String> {
        let (holder, buyer) = (self.user()?, self.user()?);
        self.deposit(&holder, "5000.00")?;
        self.deposit(&buyer, "5000.00")?;
        self.place_issue(&holder)?;
        self.bust_a_trade(&holder, &buyer)?;
        let lifted = self.freeze(&holder)?;
        let lift = json!({ "actId": lifted, "document": "Decision 2-18/2026" });
        self.approved(["enforcement", "lift"], &lift)?;
        self.until_enforced()?;
        self.freeze(&holder)?;
        let extract = self.extract(&holder)?;
        self.suspend_a_deposit()?;
        self.record_acts(&buyer)?;
        Ok(extract)
    }

    /// A user who may trade.
    fn user(&self) -> anyhow::Result<String> {
        let request = json!({
            "kycStatus": "KYC_STATUS_STANDARD", "fullName": "A person", "qualifiedInvestor": true,
        });
        let made = self.call(OPERATOR, ["user", "create"], &request)?;
        text(&made, "/profile/userId")
    }

    /// Makes a call that takes two persons.
    fn approved(&self, command: [&str; 2], request: &Value) -> anyhow::Result<()> {
        let [noun, verb] = command;
        let data = request.to_string();
        let ask = ["--token", ANNA, noun, verb, "--data", data.as_str()];
        let ask = [&ask[..], &["--approval", "stores"]].concat();
        let asked = self.ask(&ask)?;
        let asked = &asked["approval"];
        let decision = json!({ "approvalId": asked["approvalId"], "hash": asked["hash"] });
        let approved = self.call(BORIS, ["approval", "approve"], &decision)?;
        ensure!(
            approved["approval"]["status"] == json!("APPROVAL_STATUS_EXECUTED"),
            "{noun} {verb} was not executed: {approved}"
        );
        Ok(())
    }

    /// Creates a payment intent; returns its id and its QR code.
    fn intent(&self, user: &str, roubles: &str) -> anyhow::Result<(String, String)> {
        let request = json!({
            "userId": user, "method": "PAYMENT_METHOD_SBP_QR",
            "amount": { "currencyCode": "RUB", "amount": { "value": roubles } },
        });
        let made = self.call(&investor(user), ["intent", "create"], &request)?;
        let id = text(&made, "/intent/paymentId")?;
        Ok((id, text(&made, "/intent/qrPayload")?))
    }

    fn pay(&self, qr_payload: &str) -> anyhow::Result<()> {
        let request = json!({ "qrPayload": qr_payload });
        let paid = self.call(OPERATOR, ["bank", "pay"], &request);
        paid.map(drop)
    }

    /// Deposits roubles and waits until they are issued.
    fn deposit(&self, user: &str, roubles: &str) -> anyhow::Result<()> {
        let (payment, qr_payload) = self.intent(user, roubles)?;
        self.pay(&qr_payload)?;
        let read = ["cfa", "list", "--user-id", user, "--external-ref"];
        let read = [&read[..], &[payment.as_str()]].concat();
        let issued = json!("OPERATION_STATUS_FINALIZED");
        self.until("a deposit", &read, |answer| {
            answer.pointer("/operations/0/status") == Some(&issued)
        })
    }

    /// Places two units of an issue with a subscriber.
    fn place_issue(&self, investor_id: &str) -> anyhow::Result<()> {
        let issuer = self.user()?;
        let request = json!({
            "symbol": ISSUE, "name": "A placed issue", "type": "INSTRUMENT_TYPE_CFA_BOND",
            "decimals": 0, "issuerId": issuer, "currencyCode": "RUB",
            "issueLimit": { "value": "10" }, "nominal": { "value": PRICE },
            "tickSize": { "value": "0.01" }, "lotSize": { "value": "1" },
            "priceBandLow": { "value": "500.00" }, "priceBandHigh": { "value": "1500.00" },
            "placement": {
                "opensAt": self.time("1 minute ago")?, "closesAt": self.time(CLOSES)?,
            },
        });
        self.call(OPERATOR, ["instrument", "register"], &request)?;
        self.activate(&issuer)?;
        let subscribe = json!({
            "instrumentId": ISSUE, "investorId": investor_id, "amount": units("2"),
            "payment": { "currencyCode": "CFA-RUB", "amount": { "value": "2000.00" } },
        });
        let by = investor(investor_id);
        self.call(&by, ["subscription", "create"], &subscribe)?;
        self.until_issue("/instrument/placement/status", "PLACEMENT_STATUS_PLACED")
    }

    /// A time relative to now, RFC 3339.
    fn time(&self, when: &str) -> anyhow::Result<String> {
        let args = ["-u", "-d", when, "+%Y-%m-%dT%H:%M:%SZ"];
        let printed = shell::output(self.folder, "date", &args)?;
        Ok(printed.trim().to_owned())
    }

    /// Signs the decision on the issue for its issuer and activates the issue.
    fn activate(&self, issuer: &str) -> anyhow::Result<()> {
        let hash = "ab".repeat(32);
        let by = format!("sandbox.issuer.{issuer}");
        let sign = json!({ "userId": issuer, "documentHash": hash });
        let signed = self.call(&by, ["bank", "sign"], &sign)?;
        let decision = json!({
            "instrumentId": ISSUE, "documentHash": hash, "signature": signed["signature"],
        });
        self.call(&by, ["instrument", "sign"], &decision)?;
        let activate = json!({ "instrumentId": ISSUE, "documentHash": hash });
        self.approved(["instrument", "activate"], &activate)?;
        self.until_issue("/instrument/status", "INSTRUMENT_STATUS_ACTIVE")
    }

    /// Waits until a field of the issue has this value.
    fn until_issue(&self, pointer: &str, wanted: &str) -> anyhow::Result<()> {
        let read = ["instrument", "get", "--instrument-id", ISSUE];
        let wanted = json!(wanted);
        self.until(pointer, &read, |answer| {
            answer.pointer(pointer) == Some(&wanted)
        })
    }

    /// Makes a trade whose buyer is sanctioned before it is settled. Its case stays open.
    fn bust_a_trade(&self, seller: &str, buyer: &str) -> anyhow::Result<()> {
        let open = json!("TRADING_PHASE_OPEN");
        let is_open = |one: &Value| one["instrumentId"] == json!(ISSUE) && one["phase"] == open;
        self.until("trading", &["market", "status"], |answer| {
            let all = answer["instruments"].as_array();
            all.is_some_and(|all| all.iter().any(is_open))
        })?;
        self.order(buyer, ISSUE, "BUY", PRICE)?;
        let sanction = json!({ "userId": buyer, "sanctioned": true });
        self.call(SERVICE, ["user", "update"], &sanction)?;
        self.order(seller, ISSUE, "SELL", PRICE)?;
        self.until("a case", &["settle", "cases"], |answer| {
            answer.pointer("/cases/0").is_some()
        })?;
        self.until_settled()
    }

    /// Freezes a unit of the issue; returns the act's id.
    fn freeze(&self, holder: &str) -> anyhow::Result<String> {
        let request = json!({
            "instrumentId": ISSUE, "holderId": holder, "amount": units("1"),
            "basis": "ENFORCEMENT_BASIS_COURT", "document": "Decision 2-17/2026",
        });
        let frozen = self.call(COMPLIANCE, ["enforcement", "freeze"], &request)?;
        self.until_enforced()?;
        text(&frozen, "/act/actId")
    }

    /// Waits until no freeze waits for the chain.
    fn until_enforced(&self) -> anyhow::Result<()> {
        let complete = ["ACTIVE", "LIFTED"].map(|of| json!(format!("ENFORCEMENT_STATUS_{of}")));
        let is_complete = |act: &Value| complete.contains(&act["status"]);
        self.until("the freezes", &["enforcement", "list"], |answer| {
            let acts = answer["acts"].as_array();
            acts.is_some_and(|acts| acts.iter().all(is_complete))
        })
    }

    /// Issues an extract for a bailiff; returns its id.
    fn extract(&self, holder: &str) -> anyhow::Result<String> {
        let request = json!({
            "instrumentId": ISSUE, "holderId": holder, "recipient": "EXTRACT_RECIPIENT_BAILIFF",
            "document": "Request 7/2026",
        });
        let issued = self.call(COMPLIANCE, ["holders", "extract"], &request)?;
        text(&issued, "/extract/extractId")
    }

    /// Pays a deposit that identity refuses.
    fn suspend_a_deposit(&self) -> anyhow::Result<()> {
        let user = self.user()?;
        let (_, qr_payload) = self.intent(&user, "100.00")?;
        let refuse = json!({
            "userId": user, "limitType": "LIMIT_TYPE_DEPOSIT", "refuseWith": "not today",
        });
        self.call(SERVICE, ["user", "set-limit"], &refuse)?;
        self.pay(&qr_payload)?;
        self.until("a suspended deposit", &["cfa", "suspended"], |answer| {
            answer.pointer("/deposits/0").is_some()
        })
    }

    /// Makes acts that the ledger, the market and settlement record.
    fn record_acts(&self, user: &str) -> anyhow::Result<()> {
        let limit = json!({
            "limitId": "stores", "userId": user, "instrumentId": "CFA-RUB",
            "side": "POSTING_SIDE_DEBIT", "windowSeconds": 3_600, "amount": { "value": "100.00" },
        });
        let limit = json!({ "limit": limit, "reason": "a drill" });
        self.call(SERVICE, ["limit", "set"], &limit)?;
        let switch = |on: bool| json!({ "userId": user, "engaged": on, "reason": "a drill" });
        self.call(SUPERVISOR, ["market", "kill-switch"], &switch(true))?;
        self.approved(["market", "kill-switch"], &switch(false))?;
        let retried = self.call(SUPERVISOR, ["settle", "retry"], &json!({}));
        retried.map(drop)
    }
}

/// Units of the issue.
fn units(value: &str) -> Value {
    json!({ "currencyCode": ISSUE, "amount": { "value": value } })
}
