//! Objects that the fuzzed requests name, and what is undone after a run.

use std::collections::BTreeSet;

use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor};
use rpc::Role;
use rpc::roles::{Rule, rule};
use serde_json::{Map, Value, json};

use super::{LAST, path, reads_only, requests, short_name};
use crate::Platform;
use crate::call::{AUDITOR, SERVICE, context, staff, text};
use crate::world::{User, amount, rub};

/// Objects of a platform, one per kind.
#[derive(Debug)]
pub struct Stage {
    /// Has money, units, orders and holds.
    pub user: User,
    pub other: User,
    /// Is blocked, limited and frozen.
    pub victim: User,
    pub bond: String,
    /// An issue without holders.
    pub spare: String,
    /// An issue that is not active yet, and its issuer's signature.
    pub draft: String,
    pub signature: String,
    /// A freeze of units.
    pub freeze: String,
    pub order: String,
    pub trade: String,
    pub trading_hold: String,
    pub closing_hold: String,
    /// Holds that are released, consumed, adjusted and read.
    pub holds: [String; 4],
    /// Operations that are made final, reversed and read.
    pub operations: [String; 3],
    pub cfa_operation: String,
    pub tx_hash: String,
    pub block_number: String,
    pub block_hash: String,
    /// Of a deposit of [`DEPOSIT`].
    pub payment: String,
    /// Of a payment that is not paid.
    pub qr_payload: String,
    pub payout: String,
    pub subscription: String,
    pub offer: String,
    /// Id and hash of two requests: one is approved, one rejected.
    pub approvals: [(String, String); 2],
}

/// What accepted requests made without its counterpart on the chain.
#[derive(Debug, Default)]
pub struct Posted {
    operations: BTreeSet<String>,
    payouts: BTreeSet<String>,
}

impl Posted {
    /// Adds the ids in an answer of the method.
    pub(super) fn note(&mut self, method: &str, answer: &Value) {
        match method {
            "ledger.CreateOperation" | "ledger.CreateOperations" => {
                ids(answer, "operationId", &mut self.operations);
            }
            "payments.InitiatePayout" => ids(answer, "payoutId", &mut self.payouts),
            _ => {}
        }
    }
}

/// Adds the texts of all members of this name, at any depth.
fn ids(answer: &Value, name: &str, into: &mut BTreeSet<String>) {
    match answer {
        Value::Object(members) => {
            let id = members.get(name).and_then(Value::as_str);
            into.extend(id.map(str::to_owned));
            members.values().for_each(|value| ids(value, name, into));
        }
        Value::Array(items) => items.iter().for_each(|item| ids(item, name, into)),
        _ => {}
    }
}

/// Money of the user.
pub const DEPOSIT: &str = "1000000.00";

impl Stage {
    /// Makes the objects.
    ///
    /// # Panics
    /// If a call is refused.
    pub async fn prepare(platform: &Platform) -> Self {
        let (user, other) = (platform.trader().await, platform.trader().await);
        let victim = platform.trader().await;
        for limit in ["DEPOSIT", "WITHDRAWAL", "TRADING"] {
            for user in [&user, &other] {
                platform.set_limit(user, limit, "1000000000.00").await;
            }
        }
        let payment = platform.deposit(&user, DEPOSIT).await;
        platform.deposit(&other, "1000.00").await;
        let (bond, spare) = (platform.bond().await, platform.bond().await);
        platform.issue(&bond, &user, "1000").await;
        platform.issue(&bond, &other, "1000").await;
        platform.place(&other, &bond, "SELL", "2.00", "1").await;
        platform.place(&user, &bond, "BUY", "2.00", "1").await;
        let trade = text(&platform.settled(&bond, 1).await[0], "/tradeId");
        let order = platform.place(&user, &bond, "BUY", "1.00", "5").await;
        let trading_hold = platform.trading_hold(&user, "CFA-RUB", "5.00").await;
        let closing_hold = platform.trading_hold(&user, &bond, "5").await;
        let request = json!({ "userId": user.id, "externalRef": payment });
        let listed = platform.ok(AUDITOR, "cfa.ListOperations", request).await;
        let tx_hash = text(&listed, "/operations/0/onchainTxHash");
        let block = platform.ok(AUDITOR, "chain.GetBlock", json!({ "number": "1" }));
        let block = block.await;
        let unpaid = platform.intent(&user, "10.00").await;
        let mut stage = Self {
            user,
            other,
            victim,
            bond,
            spare,
            draft: String::new(),
            signature: String::new(),
            freeze: String::new(),
            order: text(&order, "/orderId"),
            trade,
            trading_hold,
            closing_hold,
            holds: Default::default(),
            operations: Default::default(),
            cfa_operation: text(&listed, "/operations/0/operationId"),
            tx_hash,
            block_number: "1".to_owned(),
            block_hash: text(&block, "/block/hash"),
            payment,
            qr_payload: text(&unpaid, "/qrPayload"),
            payout: String::new(),
            subscription: String::new(),
            offer: String::new(),
            approvals: Default::default(),
        };
        stage.prepare_ledger(platform).await;
        stage.prepare_offers(platform).await;
        stage.prepare_issues(platform).await;
        stage.prepare_approvals(platform).await;
        stage
    }

    async fn prepare_ledger(&mut self, platform: &Platform) {
        for at in 0..self.holds.len() {
            let request = requests::special(self, "ledger.CreateHold").expect("a request");
            let made = platform.ok(SERVICE, "ledger.CreateHold", request).await;
            self.holds[at] = text(&made, "/hold/holdId");
        }
        for at in 0..self.operations.len() {
            let request = requests::special(self, "ledger.CreateOperation").expect("a request");
            let made = platform.ok(SERVICE, "ledger.CreateOperation", request);
            self.operations[at] = text(&made.await, "/operation/operationId");
        }
    }

    async fn prepare_offers(&mut self, platform: &Platform) {
        for (name, pointer) in [
            ("payments.InitiatePayout", "/payout/payoutId"),
            ("cfa.Subscribe", "/subscription/subscriptionId"),
            ("cfa.OfferUnits", "/offer/offerId"),
        ] {
            let token = match name {
                "payments.InitiatePayout" => SERVICE.to_owned(),
                _ => self.user.token(),
            };
            let request = requests::special(self, name).expect("a request");
            let made = text(&platform.ok(&token, name, request).await, pointer);
            match name {
                "payments.InitiatePayout" => self.payout = made,
                "cfa.Subscribe" => self.subscription = made,
                _ => self.offer = made,
            }
        }
    }

    async fn prepare_issues(&mut self, platform: &Platform) {
        for (name, pointer) in [
            ("cfa.RegisterInstrument", "/instrumentId"),
            ("sandbox.SignDocument", "/signature"),
            ("cfa.FreezeUnits", "/act/actId"),
        ] {
            let request = requests::special(self, name).expect("a request");
            let made = text(&platform.ok(SERVICE, name, request).await, pointer);
            match name {
                "cfa.RegisterInstrument" => self.draft = made,
                "sandbox.SignDocument" => self.signature = made,
                _ => self.freeze = made,
            }
        }
    }

    async fn prepare_approvals(&mut self, platform: &Platform) {
        for at in 0..self.approvals.len() {
            let name = "approvals.RequestApproval";
            let request = requests::special(self, name).expect("a request");
            let asked = platform.ok(&staff("fuzz"), name, request).await;
            let (id, hash) = ("/approval/approvalId", "/approval/hash");
            self.approvals[at] = (text(&asked, id), text(&asked, hash));
        }
    }

    /// Token that may call the method.
    pub(super) fn token(&self, method: &MethodDescriptor) -> String {
        let name = short_name(method);
        let Rule::AnyOf(roles) = rule(&path(method)) else {
            panic!("{name} has no roles");
        };
        let token = if reads_only(method) && roles.contains(Role::Auditor) {
            AUDITOR
        } else if LAST.contains(&name.as_str()) && roles.contains(Role::Service) {
            SERVICE
        } else if roles.contains(Role::Investor) {
            return self.user.token();
        } else if roles.contains(Role::Service) {
            SERVICE
        } else {
            // Requester and approver are two persons.
            let is_request = name == "approvals.RequestApproval";
            return staff(if is_request { "fuzz" } else { "judge" });
        };
        token.to_owned()
    }

    /// A valid request of the method, with fresh ids.
    pub(super) fn request(&self, method: &MethodDescriptor) -> Value {
        let name = short_name(method);
        let own = requests::special(self, &name);
        let mut request = own.unwrap_or_else(|| self.general(&name, &method.input()));
        request["context"] = context();
        request
    }

    /// A request whose fields follow from their names and types.
    fn general(&self, method: &str, message: &MessageDescriptor) -> Value {
        let mut request = Map::new();
        for field in message.fields() {
            if field.name() == "context" || field.is_list() || field.is_map() {
                continue;
            }
            if let Some(value) = self.value(method, &field) {
                request.insert(field.json_name().to_owned(), value);
            }
        }
        Value::Object(request)
    }

    fn value(&self, method: &str, field: &FieldDescriptor) -> Option<Value> {
        let is_of = |area: &str| method.starts_with(area);
        let named = match field.name() {
            "user_id" | "investor_id" | "holder_id" | "issuer_id" | "from_user_id" => &self.user.id,
            "to_user_id" => &self.other.id,
            "instrument_id" => &self.bond,
            "order_id" => &self.order,
            "trade_id" => &self.trade,
            "operation_id" if is_of("cfa.") => &self.cfa_operation,
            "operation_id" => &self.operations[2],
            "hold_id" if is_of("market.") => &self.trading_hold,
            "hold_id" => &self.holds[3],
            "payment_id" => &self.payment,
            "payout_id" => &self.payout,
            "subscription_id" => &self.subscription,
            "offer_id" => &self.offer,
            "approval_id" => &self.approvals[0].0,
            "tx_hash" => &self.tx_hash,
            "subaccount_id" => return Some(json!(self.user.cash())),
            "account_id" => return Some(json!(format!("{}:MAIN", self.user.id))),
            "reason" => return Some(json!("a drill")),
            "reservation_id" | "redemption_id" | "batch_id" | "limit_id" => {
                return Some(json!(fresh()));
            }
            _ => return self.of_kind(field),
        };
        Some(json!(named))
    }

    fn of_kind(&self, field: &FieldDescriptor) -> Option<Value> {
        match field.kind() {
            Kind::Message(message) => match message.full_name() {
                "dfa.common.v1.Money" => Some(rub("1.00")),
                "dfa.common.v1.MonetaryAmount" => Some(amount(&self.bond, "1")),
                "dfa.common.v1.Decimal" => Some(json!({ "value": "1" })),
                "dfa.common.v1.PaginationRequest" => Some(json!({ "pageSize": 5 })),
                _ => None,
            },
            Kind::Enum(values) => values.values().nth(1).map(|value| json!(value.name())),
            _ => None,
        }
    }

    /// Reverses the operations and cancels the payouts that were accepted.
    ///
    /// # Panics
    /// If an operation cannot be reversed.
    pub(super) async fn undo_money(&self, platform: &Platform, posted: &Posted) {
        // Ids are ordered by time: the newest first.
        let all: BTreeSet<&String> = posted.operations.iter().chain(&self.operations).collect();
        for operation in all.into_iter().rev() {
            let request = json!({ "operationId": operation, "reason": "a drill" });
            let name = "ledger.ReverseOperation";
            if let Err(refusal) = platform.call(SERVICE, name, request).await {
                assert_eq!(
                    refusal.reason, "ALREADY_REVERSED",
                    "{operation}: {refusal:?}"
                );
            }
        }
        for payout in posted.payouts.iter().chain([&self.payout]) {
            let cancel = json!({ "payoutId": payout, "failureCode": "TEST" });
            let called = platform.call(SERVICE, "payments.CancelPayout", cancel);
            // One that has ended already cannot be cancelled.
            if let Err(refusal) = called.await {
                assert!(!refusal.is_fault(), "{payout}: {refusal:?}");
            }
        }
    }

    /// Lifts halts, kill switches, freezes and faults.
    pub(super) async fn undo_settings(&self, platform: &Platform) {
        let lift = async |name: &str, request: Value| {
            // What was not set, or has ended for the day, cannot be lifted.
            if let Err(refusal) = platform.call(SERVICE, name, request).await {
                assert!(!refusal.is_fault(), "{name}: {refusal:?}");
            }
        };
        for user in ["", &self.victim.id] {
            let switch = json!({ "userId": user, "engaged": false, "reason": "over" });
            lift("market.SetKillSwitch", switch).await;
        }
        let open = json!({
            "instrumentId": self.bond, "phase": "TRADING_PHASE_OPEN", "reason": "over",
        });
        lift("market.SetTradingPhase", open).await;
        let active = json!({
            "subaccountId": self.victim.cash(), "status": "SUB_ACCOUNT_STATUS_ACTIVE",
            "reason": "over",
        });
        lift("ledger.SetSubAccountStatus", active).await;
        for account in ["", "40702810900000000001"] {
            let none = json!({ "fault": "BANK_FAULT_NONE", "account": account });
            lift("sandbox.SetFault", none).await;
        }
    }
}

/// An id that nothing has.
pub(super) fn fresh() -> String {
    uuid::Uuid::now_v7().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_found_at_any_depth() {
        let answer = json!({ "outcomes": [{ "operation": { "operationId": "a" } }, { "x": 1 }] });
        let mut posted = Posted::default();
        posted.note("ledger.CreateOperations", &answer);
        posted.note("ledger.GetOperation", &json!({ "operationId": "b" }));
        assert_eq!(posted.operations, BTreeSet::from(["a".to_owned()]));
    }
}
