//! Reads of an issue: its holders beside chain and ledger, the hashes of blocks, reads over HTTP.

use proto::cfa::v1 as pb;
use proto::common::v1::{HashAlgorithm, OperationStatus, PaginationRequest};
use proto::ledger::v1 as ledger_pb;
use sha2::Digest as _;

use crate::lines::Lines;
use crate::node::restated_world;
use crate::world::*;

// rows: R010 R030 R031 R217 R326
#[tokio::test(flavor = "multi_thread")]
async fn r031_holders_match_the_chain_and_the_ledger() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    for n in 1..=5 {
        world
            .issue("BOND-1", &format!("investor-{n}"), &n.to_string())
            .await;
    }
    let request = pb::RedeemInvestmentCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "investor-5".into(),
        amount: amount("BOND-1", "5"),
        redemption_id: "buyback-1".into(),
        reason: pb::RedemptionReason::Buyback.into(),
    };
    world.deposit("issuer", "5000.00").await;
    let offered = world.offer("BOND-1", "investor-5", "5", "5000.00").await;
    offered.expect("offered");
    let bought = world
        .cfa
        .redeem_investment_cfa(request)
        .await
        .expect("sent")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        world.settle(&bought).await.status(),
        OperationStatus::Finalized
    );
    assert_eq!(
        world
            .balance("investor-5:CFA-RUB")
            .await
            .available
            .to_string(),
        "5000.00"
    );
    let mut seen = Vec::new();
    let mut token = String::new();
    loop {
        let request = pb::ListHoldersRequest {
            instrument_id: "BOND-1".into(),
            pagination: Some(PaginationRequest {
                page_size: 2,
                page_token: token,
            }),
            ..Default::default()
        };
        let page = world
            .cfa
            .list_holders(request)
            .await
            .expect("listed")
            .into_inner();
        assert!(page.holders.len() <= 2);
        seen.extend(page.holders);
        assert!(seen.len() <= 4, "{seen:?}");
        token = page.pagination.expect("pagination").next_page_token;
        if token.is_empty() {
            break;
        }
    }
    seen.sort_by(|a, b| a.user_id.cmp(&b.user_id));
    assert_eq!(
        seen.iter()
            .map(|holder| holder.user_id.as_str())
            .collect::<Vec<_>>(),
        ["investor-1", "investor-2", "investor-3", "investor-4"]
    );
    for (n, holder) in (1..).zip(&seen) {
        let units = n.to_string();
        assert_eq!(
            (holder.balance.clone(), holder.locked.clone()),
            (decimal(&units), decimal("0"))
        );
        assert_eq!(world.tokens("BOND-1", &holder.user_id).await, n);
        assert_eq!(
            world
                .balance(&format!("{}:BOND-1", holder.user_id))
                .await
                .balance
                .to_string(),
            units
        );
    }
    assert_eq!(seen[1].share_percent, decimal("20.000000"));
    assert_replay_gives_the_registry(&mut world).await;
    let unknown = pb::ListHoldersRequest {
        instrument_id: "NO-SUCH".into(),
        ..Default::default()
    };
    assert_eq!(
        world
            .cfa
            .list_holders(unknown)
            .await
            .expect_err("unknown")
            .message(),
        "Instrument not found"
    );
    world.stop().await;
}

// rows: R030
#[tokio::test(flavor = "multi_thread")]
async fn r030_reserved_units_of_a_page_are_read_in_one_call() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    for user in ["alice", "bob", "carol", "dave"] {
        world.issue("BOND-1", user, "5").await;
    }
    let hold = ledger_pb::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger_pb::Hold {
            subaccount_id: "bob:BOND-1".into(),
            amount: amount("BOND-1", "3"),
            reason: "an order".into(),
            ..Default::default()
        }),
    };
    world.ledger.create_hold(hold).await.expect("held");
    for page_size in [1, 4] {
        world.faults.take_calls("");
        let request = pb::ListHoldersRequest {
            instrument_id: "BOND-1".into(),
            pagination: Some(PaginationRequest {
                page_size,
                ..Default::default()
            }),
            ..Default::default()
        };
        let listed = world.cfa.list_holders(request).await.expect("listed");
        let holders = listed.into_inner().holders;
        assert_eq!(holders.len(), page_size as usize);
        for holder in holders {
            let locked = if holder.user_id == "bob" { "3" } else { "0" };
            assert_eq!(holder.locked, decimal(locked), "{}", holder.user_id);
        }
        let calls = world.faults.take_calls("dfa.ledger.v1.LedgerService");
        assert_eq!(calls, ["ListSubAccounts"], "page of {page_size}");
    }
    world.stop().await;
}

/// The answer of CheckIntegrity.
async fn checked(
    world: &World,
    block_number: u64,
    hash: &str,
    algorithm: HashAlgorithm,
) -> pb::CheckIntegrityResponse {
    let request = pb::CheckIntegrityRequest {
        context: None,
        block_number,
        block_hash: hash.into(),
        algorithm: algorithm.into(),
    };
    let checked = world.cfa.clone().check_integrity(request).await;
    checked.expect("checked").into_inner()
}

// rows: R032 R326
#[tokio::test(flavor = "multi_thread")]
async fn r032_block_hashes_are_recomputed() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let operation = world.deposit("alice", "1.00").await;
    let block = world
        .connector()
        .block(Some(operation.block_number))
        .await
        .expect("block lookup")
        .expect("exists");
    let check = async |hash: &str, algorithm: HashAlgorithm| {
        checked(&world, block.number, hash, algorithm).await
    };
    let real = block.hash.to_string();
    assert_eq!(real, chain::keccak256(&block.header));
    for given in [
        real.clone(),
        real.to_uppercase().replace("0X", ""),
        real.trim_start_matches("0x").to_owned(),
    ] {
        let checked = check(&given, HashAlgorithm::Unspecified).await;
        assert_eq!(
            (checked.valid, checked.computed_hash.as_str()),
            (true, real.as_str())
        );
    }
    // One digit differs.
    let digit = if real.ends_with('0') { "1" } else { "0" };
    let other = format!("{}{digit}", &real[..real.len() - 1]);
    assert_eq!(other.len(), real.len());
    let altered = check(&other, HashAlgorithm::Keccak256).await;
    assert_eq!(
        (altered.valid, altered.computed_hash.as_str()),
        (false, real.as_str())
    );
    for algorithm in [HashAlgorithm::Sha256, HashAlgorithm::Streebog256] {
        let computed = check(&real, algorithm).await;
        let sha256 = format!("0x{}", hex::encode(sha2::Sha256::digest(&block.header)));
        let is_sha256 = algorithm == HashAlgorithm::Sha256;
        assert_eq!(computed.computed_hash == sha256, is_sha256);
        assert!(!computed.valid && computed.computed_hash.len() == 66);
        assert!(check(&computed.computed_hash, algorithm).await.valid);
    }
    let request = pb::CheckIntegrityRequest {
        block_number: 1_000_000,
        ..Default::default()
    };
    assert_eq!(
        world
            .cfa
            .check_integrity(request)
            .await
            .expect_err("unknown")
            .code(),
        tonic::Code::NotFound
    );
    world.stop().await;
}

// rows: R032
#[tokio::test(flavor = "multi_thread")]
async fn r032_a_header_without_the_stated_hash_is_not_valid_and_a_critical_alert() {
    let lines = Lines::record();
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node) = restated_world(folder.path()).await;
    let number = world.deposit("alice", "1.00").await.block_number;
    let block = world.connector().block(Some(number)).await.expect("read");
    let block = block.expect("exists");
    let (stated, of_header) = (block.hash.to_string(), chain::keccak256(&block.header));
    assert_ne!(stated, of_header);
    let sha256 = format!("0x{}", hex::encode(sha2::Sha256::digest(&block.header)));
    let alerts = || {
        let mut lines = lines.all();
        lines.retain(|line| line["severity"] == "critical");
        lines
    };
    for (at, (given, algorithm, computed)) in [
        (&stated, HashAlgorithm::Keccak256, &of_header),
        (&of_header, HashAlgorithm::Keccak256, &of_header),
        (&sha256, HashAlgorithm::Sha256, &sha256),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(alerts().len(), at);
        let answer = checked(&world, number, given, algorithm).await;
        assert_eq!((answer.valid, &answer.computed_hash), (false, computed));
        let alerts = alerts();
        let alert = alerts.last().expect("an alert");
        assert_eq!(alert["block_number"], number);
        assert_eq!(alert["stated_hash"], stated);
        assert_eq!(alert["computed_hash"], of_header);
    }
    world.stop().await;
    node.stop().await;
}

// rows: R330 R313 R314 R315 R288
#[tokio::test(flavor = "multi_thread")]
async fn r330_http_reads_show_what_the_calls_return() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let operation = world.issue("BOND-1", "alice", "7").await;
    let url = world.listen().await;
    let http = reqwest::Client::builder().timeout(WAIT).build();
    let http = http.expect("an HTTP client");
    let get = async |path: &str, credential: Option<&str>| {
        let mut request = http.get(format!("{url}{path}"));
        if let Some(credential) = credential {
            request = request.bearer_auth(credential);
        }
        let response = request.send().await.expect("answered");
        let status = response.status().as_u16();
        let body: serde_json::Value = response.json().await.expect("JSON");
        (status, body)
    };
    let of_operation = format!("/operations/{}", operation.operation_id);
    for (credential, refused) in [
        (None, 401),
        (Some("sandbox.unknown"), 401),
        (Some("sandbox.investor.alice"), 403),
    ] {
        assert_eq!(get(&of_operation, credential).await.0, refused);
    }
    let staff = Some("sandbox.auditor");
    let (status, body) = get(&of_operation, staff).await;
    let called = world.operation(&operation.operation_id).await;
    let expected = rpc::json::value(&called, "dfa.cfa.v1.CfaOperation");
    assert_eq!((status, &body), (200, &expected));
    assert_eq!(
        (&body["operationId"], &body["status"], &body["type"]),
        (
            &operation.operation_id.clone().into(),
            &"FINALIZED".into(),
            &"ISSUANCE".into()
        )
    );
    let (status, body) = get("/operations/none", staff).await;
    assert_eq!(
        (status, &body["message"]),
        (404, &"Operation not found".into())
    );
    let (_, body) = get("/operations?user_id=alice&status=FINALIZED", staff).await;
    assert_eq!(body["items"], serde_json::json!([expected]));
    let (_, body) = get("/instruments", staff).await;
    let bond = world.instrument("BOND-1").await;
    let bond = rpc::json::value(&bond, "dfa.cfa.v1.Instrument");
    assert_eq!(body["items"][0], bond);
    let (_, body) = get("/holders?instrument_id=BOND-1", staff).await;
    assert_eq!(body["items"].as_array().map(Vec::len), Some(1));
    assert_eq!(
        (
            &body["items"][0]["userId"],
            &body["items"][0]["balance"]["value"]
        ),
        (&"alice".into(), &"7".into())
    );
    world.stop().await;
}

/// The chain's transfers, summed here, equal the holder registry (R217).
async fn assert_replay_gives_the_registry(world: &mut World) {
    let mut balances: std::collections::BTreeMap<(String, String), types::Decimal> =
        std::collections::BTreeMap::new();
    let mut from_block = 0;
    loop {
        let request = pb::ReplayChainTransfersRequest {
            context: None,
            from_block,
        };
        let part = world
            .cfa
            .replay_chain_transfers(request)
            .await
            .expect("replayed")
            .into_inner();
        for transfer in part.transfers {
            assert!((from_block..=part.through_block).contains(&transfer.block_number));
            let quantity: types::Decimal = transfer
                .quantity
                .expect("quantity")
                .value
                .parse()
                .expect("number");
            for (address, change) in [
                (transfer.from_address, quantity.negated()),
                (transfer.to_address, quantity),
            ] {
                let key = (transfer.instrument_id.clone(), address);
                let balance = balances.entry(key).or_insert(types::Decimal::ZERO);
                *balance = balance.checked_add(change).expect("in range");
            }
        }
        from_block = part.through_block + 1;
        if from_block > part.last_block {
            break;
        }
    }
    for instrument_id in ["CFA-RUB", "BOND-1"] {
        let request = pb::ListHoldersRequest {
            instrument_id: instrument_id.to_owned(),
            ..Default::default()
        };
        let holders = world.cfa.list_holders(request).await.expect("listed");
        for holder in holders.into_inner().holders {
            let key = (instrument_id.to_owned(), holder.address);
            let replayed = balances.remove(&key).expect("a holder of the log");
            let listed = holder.balance.expect("balance").value;
            assert_eq!(replayed, listed.parse().expect("number"), "{key:?}");
        }
        let issued = (instrument_id.to_owned(), String::new());
        assert!(
            balances
                .remove(&issued)
                .is_some_and(|rest| rest.is_negative())
        );
    }
    assert!(balances.values().all(|balance| balance.is_zero()));
}
