//! Calls that take two persons (D32), over the public ports and by the command line.

use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, staff, text};
use tests::shared::{platform, run};

/// The phase of an instrument.
async fn phase(platform: &tests::Platform, bond: &str) -> Value {
    let status = platform.ok(AUDITOR, "market.GetMarketStatus", json!({}));
    let instruments = status.await["instruments"].clone();
    let instruments = instruments.as_array().cloned().unwrap_or_default();
    let own = |one: &&Value| one["instrumentId"] == json!(bond);
    let found = instruments.iter().find(own).expect("the instrument");
    found["phase"].clone()
}

// rows: R332 R333
#[test]
fn d32_one_person_halts_and_two_lift_the_halt() {
    run(async {
        let platform = platform().await;
        let bond = platform.bond().await;
        let set =
            |phase: &str| json!({ "instrumentId": bond, "phase": phase, "reason": "a drill" });
        let method = "market.SetTradingPhase";
        let (halt, open) = (set("TRADING_PHASE_HALT"), set("TRADING_PHASE_OPEN"));
        platform.ok(OPERATOR, method, halt.clone()).await;
        for token in [OPERATOR, &staff("anna")] {
            platform.refused(token, method, open.clone()).await.is(
                400,
                "failed_precondition",
                "This call needs an approval",
                "APPROVAL_REQUIRED",
            );
        }
        assert_eq!(phase(platform, &bond).await, json!("TRADING_PHASE_HALT"));
        let approval = platform.approved(method, open.clone()).await;
        assert_eq!(phase(platform, &bond).await, json!("TRADING_PHASE_OPEN"));
        assert_eq!(text(&approval, "/requestedBy"), "anna");
        assert_eq!(text(&approval, "/decidedBy"), "boris");

        // A token without a name is no person, and one person with two tokens is one.
        let path = tests::call::path_of(method);
        let ask = json!({ "method": path, "requestJson": open.to_string(), "reason": "drill" });
        let request = "approvals.RequestApproval";
        let nameless = platform.refused(OPERATOR, request, ask.clone()).await;
        assert_eq!(nameless.reason, "PERSON_REQUIRED", "{nameless:?}");
        let asked = platform.ok("sandbox.operator.anna", request, ask).await;
        let decision = json!({
            "approvalId": asked["approval"]["approvalId"], "hash": asked["approval"]["hash"],
        });
        let own = platform.refused(
            "sandbox.market-supervisor.anna",
            "approvals.Approve",
            decision,
        );
        let own = own.await;
        assert_eq!(own.reason, "SAME_PERSON", "{own:?}");
    });
}

// rows: R332 R350
#[test]
fn d32_a_call_is_requested_and_approved_by_the_command_line() {
    run(async {
        let platform = platform().await;
        let user = platform.trader().await;
        let block = json!({ "userId": user.id, "reason": "a drill" });
        platform.ok(OPERATOR, "identity.BlockUser", block).await;
        let unblock = ["user", "unblock", "--user-id", &user.id, "--reason", "over"];
        let mut args = vec!["--json", "--token", "sandbox.operator.anna"];
        args.extend(unblock);
        let alone = platform.cli(&args).await;
        assert!(alone.stderr.contains("needs an approval"), "{alone:?}");
        // Nor does the default token, with all its roles, lift it or request that.
        let desk = platform.cli(&unblock).await;
        assert!(desk.stderr.contains("needs an approval"), "{desk:?}");
        let mut request = unblock.to_vec();
        request.extend(["--approval", "the drill is over"]);
        let nameless = platform.cli(&request).await;
        let refusal = "Caller is not a named person";
        assert!(nameless.stderr.contains(refusal), "{nameless:?}");
        args.extend(["--approval", "the drill is over"]);
        let asked = platform.cli(&args).await.success().json();
        let (id, hash) = (
            text(&asked, "/approval/approvalId"),
            text(&asked, "/approval/hash"),
        );
        let shown = platform
            .cli(&["--json", "approval", "get", "--approval-id", &id])
            .await;
        let shown = shown.success().json();
        assert!(text(&shown, "/approval/requestJson").contains(&user.id));
        let approve = [
            "--json",
            "--token",
            "sandbox.compliance.vera",
            "approval",
            "approve",
            "--approval-id",
            &id,
            "--hash",
            &hash,
        ];
        let approved = platform.cli(&approve).await.success().json();
        let executed = "APPROVAL_STATUS_EXECUTED";
        assert_eq!(text(&approved, "/approval/status"), executed);
        let profile = platform.ok(
            AUDITOR,
            "identity.GetUserProfile",
            json!({ "userId": user.id }),
        );
        let status = profile.await["profile"]["status"].clone();
        assert_eq!(status, json!("USER_STATUS_ACTIVE"));
    });
}
