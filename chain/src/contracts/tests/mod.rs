//! Tests of the contracts on the development chain, through the actions of services.
//!
//! | file | content |
//! |---|---|
//! | `machine` | the chain's EVM without blocks and disk, and a market on it |
//! | `rights` | roles, ownership, terms, enforcement |
//! | `parts` | distributions and the move of holders in parts |
//! | `random` | random sequences against a twin |
//! | `gas` | gas of each action |
// `100_00` is a hundred roubles in kopecks.
#![allow(clippy::inconsistent_digit_grouping)]

mod gas;
mod machine;
mod parts;
mod random;
mod rights;

use std::time::Duration;

use alloy::consensus::{SignableTransaction, TxEip1559, TxEnvelope};
use alloy::eips::Encodable2718;
use alloy::primitives::{Bytes, TxKind, U256};
use alloy::providers::{DynProvider, Provider, ProviderBuilder};
use alloy::rpc::client::RpcClient;
use alloy::rpc::types::TransactionReceipt;
use alloy::signers::SignerSync;
use alloy::signers::local::PrivateKeySigner;
use alloy::sol_types::{SolCall, SolEvent};
use tokio_util::sync::CancellationToken;

use crate::contracts::{Action, CfaToken, Contracts, Payout, Settlement, Trade, id_hash};
use crate::dev::{DevChain, DevChainConfig};
use crate::{Address, TxHash};

const CHAIN_ID: u64 = 31_337;

struct Bench {
    provider: DynProvider,
    signer: PrivateKeySigner,
    nonce: u64,
    shutdown: CancellationToken,
    sealer: tokio::task::JoinHandle<()>,
    head: tokio::sync::watch::Receiver<u64>,
    _folder: tempfile::TempDir,
}

impl Bench {
    async fn start() -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let signer = PrivateKeySigner::from_slice(&[7; 32]).expect("key");
        let shutdown = CancellationToken::new();
        let config = DevChainConfig {
            data_dir: folder.path().to_owned(),
            chain_id: CHAIN_ID,
            seal_interval: Duration::from_millis(1),
            funded: vec![signer.address()],
        };
        let (chain, sealer) = DevChain::start(config, shutdown.clone())
            .await
            .expect("chain starts");
        let head = chain.head();
        let provider = ProviderBuilder::new()
            .disable_recommended_fillers()
            .connect_client(RpcClient::new(chain, true))
            .erased();
        Self {
            provider,
            signer,
            nonce: 0,
            shutdown,
            sealer,
            head,
            _folder: folder,
        }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.sealer.await.expect("sealer ends");
    }

    async fn send(&mut self, action: &Action) -> TransactionReceipt {
        let call = action.call();
        let tx = TxEip1559 {
            chain_id: CHAIN_ID,
            nonce: self.nonce,
            gas_limit: call.gas_limit.expect("actions have a limit"),
            max_fee_per_gas: 1,
            max_priority_fee_per_gas: 1,
            to: call.to.map_or(TxKind::Create, |to| TxKind::Call(to.raw())),
            value: U256::ZERO,
            access_list: Default::default(),
            input: Bytes::from(call.data),
        };
        let signature = self
            .signer
            .sign_hash_sync(&tx.signature_hash())
            .expect("signature");
        let envelope = TxEnvelope::from(tx.into_signed(signature));
        let hash = *self
            .provider
            .send_raw_transaction(&envelope.encoded_2718())
            .await
            .expect("accepted")
            .tx_hash();
        self.nonce += 1;
        loop {
            self.head.borrow_and_update();
            if let Some(receipt) = self
                .provider
                .get_transaction_receipt(hash)
                .await
                .expect("asked")
            {
                return receipt;
            }
            let block = tokio::time::timeout(testkit::PATIENCE, self.head.changed());
            block.await.expect("a block in time").expect("chain lives");
        }
    }

    async fn done(&mut self, action: &Action) -> TransactionReceipt {
        let receipt = self.send(action).await;
        assert!(receipt.status(), "{action:?} reverted");
        receipt
    }

    async fn deploy(&mut self, action: &Action) -> Address {
        Address::from(
            self.done(action)
                .await
                .contract_address
                .expect("a deployment"),
        )
    }

    fn operator(&self) -> Address {
        Address::from(self.signer.address())
    }

    /// Deploys registry, CFA-RUB, settlement and redemption.
    async fn platform(&mut self) -> Contracts {
        let fee_account = Address::of_user("system:fees");
        let platform = Action::DeployPlatform {
            name: "CFA-RUB".into(),
            symbol: "CFA-RUB".into(),
            decimals: 2,
            owner: self.operator(),
            operator: self.operator(),
            fee_account,
            accounts: vec![fee_account],
        };
        Contracts::of_platform(&self.deploy(&platform).await)
    }

    async fn token(&mut self, symbol: &str, contracts: &Contracts) -> Address {
        let deploy = Action::DeployToken {
            name: symbol.into(),
            symbol: symbol.into(),
            decimals: 0,
            registry: contracts.registry,
            owner: self.operator(),
            grants: contracts.token_grants(self.operator()),
            terms: None,
        };
        self.deploy(&deploy).await
    }

    /// A mint under an id of its own.
    fn mint(&self, token: Address, to: Address, units: u128) -> Action {
        Action::Mint {
            token,
            to,
            units,
            id: Some(format!("mint {}", self.nonce)),
        }
    }

    async fn read<C: SolCall>(&self, contract: Address, call: C) -> C::Return {
        let request = alloy::rpc::types::TransactionRequest::default();
        let request = alloy::network::TransactionBuilder::with_to(request, contract.raw());
        let request = alloy::network::TransactionBuilder::with_input(request, call.abi_encode());
        C::abi_decode_returns(&self.provider.call(request).await.expect("a view"))
            .expect("its type")
    }

    async fn balance(&self, token: Address, holder: Address) -> u64 {
        self.read(
            token,
            CfaToken::balanceOfCall {
                account: holder.raw(),
            },
        )
        .await
        .to()
    }

    async fn supply(&self, token: Address) -> u64 {
        self.read(token, CfaToken::totalSupplyCall {}).await.to()
    }
}

fn member(n: usize) -> Address {
    Address::of_user(&format!("member-{n}"))
}

/// A platform with one bond, and members with money and bonds.
async fn market(members: usize) -> (Bench, Contracts, Address) {
    let mut bench = Bench::start().await;
    let contracts = bench.platform().await;
    let bond = bench.token("BOND-1", &contracts).await;
    let accounts: Vec<_> = (0..members).map(member).collect();
    bench
        .done(&Action::RegisterIdentities {
            registry: contracts.registry,
            accounts: accounts.clone(),
        })
        .await;
    for account in accounts {
        let mint = bench.mint(contracts.money, account, 1_000_000_00);
        bench.done(&mint).await;
        let mint = bench.mint(bond, account, 1_000);
        bench.done(&mint).await;
    }
    (bench, contracts, bond)
}

fn trade(token: Address, number: u64, buyer: usize, seller: usize, quantity: u128) -> Trade {
    let payment = quantity * 990_00;
    Trade {
        token,
        number,
        buyer: member(buyer),
        seller: member(seller),
        quantity,
        payment,
        fee: payment / 1000,
    }
}

// rows: R028 R049 R073
#[tokio::test]
async fn r049_mint_and_burn_move_supply_and_holder() {
    let mut bench = Bench::start().await;
    let contracts = bench.platform().await;
    let bond = bench.token("BOND-1", &contracts).await;
    assert_ne!(bond, contracts.money);
    let alice = Address::of_user("alice");
    let mint = bench.mint(contracts.money, alice, 100_00);
    let refused = bench.send(&mint).await;
    assert!(!refused.status(), "not on the allow-list");
    bench
        .done(&Action::RegisterIdentities {
            registry: contracts.registry,
            accounts: vec![alice, alice],
        })
        .await;
    bench.done(&mint).await;
    let again = bench.send(&mint).await;
    assert!(!again.status(), "an id is accepted once");
    assert_eq!(
        (
            bench.balance(contracts.money, alice).await,
            bench.supply(contracts.money).await
        ),
        (100_00, 100_00)
    );
    bench
        .done(&Action::Burn {
            token: contracts.money,
            from: alice,
            units: 40_00,
            id: Some("burn 1".into()),
        })
        .await;
    assert_eq!(
        (
            bench.balance(contracts.money, alice).await,
            bench.supply(contracts.money).await
        ),
        (60_00, 60_00)
    );
    let too_much = bench
        .send(&Action::Burn {
            token: contracts.money,
            from: alice,
            units: 60_01,
            id: Some("burn 2".into()),
        })
        .await;
    assert!(!too_much.status());
    assert_eq!(bench.supply(contracts.money).await, 60_00);
    bench.stop().await;
}

#[tokio::test]
async fn transfers_check_freeze_pause_and_allow_list() {
    let (mut bench, contracts, bond) = market(2).await;
    let (alice, bob, stranger) = (member(0), member(1), Address::of_user("stranger"));
    let transfer = |to| Action::Transfer {
        token: bond,
        from: alice,
        to,
        units: 10,
    };
    let can = |to: Address| CfaToken::canTransferCall {
        from: alice.raw(),
        to: to.raw(),
        amount: U256::from(10),
    };
    assert!(!bench.read(bond, can(stranger)).await);
    assert!(!bench.send(&transfer(stranger)).await.status());
    assert!(bench.read(bond, can(bob)).await);
    bench.done(&transfer(bob)).await;
    bench.done(&transfer(alice)).await;
    assert_eq!(
        (
            bench.balance(bond, alice).await,
            bench.balance(bond, bob).await
        ),
        (990, 1010),
        "a transfer to oneself changes nothing"
    );
    bench
        .done(&Action::SetFrozen {
            token: bond,
            account: alice,
            frozen: true,
        })
        .await;
    assert!(!bench.read(bond, can(bob)).await);
    assert!(!bench.send(&transfer(bob)).await.status());
    bench
        .done(&Action::SetFrozen {
            token: bond,
            account: alice,
            frozen: false,
        })
        .await;
    bench.done(&transfer(bob)).await;
    assert_eq!(bench.supply(bond).await, 2_000);
    let _ = contracts;
    bench.stop().await;
}

#[tokio::test]
async fn failing_trade_restores_both_legs_and_leaves_the_batch() {
    let (mut bench, contracts, bond) = market(3).await;
    let mut impossible = trade(bond, 2, 1, 2, 1);
    // More money than the buyer has, after the units have moved.
    impossible.payment = 5_000_000_00;
    let trades = vec![
        trade(bond, 1, 0, 1, 10),
        impossible,
        trade(bond, 3, 1, 2, 5),
    ];
    let receipt = bench
        .done(&Action::SettleTrades {
            settlement: contracts.settlement,
            id: "n1:1-3".into(),
            trades,
        })
        .await;
    let failed: Vec<_> = receipt
        .logs()
        .iter()
        .filter_map(|log| Settlement::TradeFailed::decode_log(&log.inner).ok())
        .collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(
        (failed[0].token, failed[0].tradeNumber.to::<u64>()),
        (bond.raw(), 2)
    );
    assert_eq!(failed[0].batchId, TxHash::raw(&id_hash("n1:1-3")));
    let fee = |quantity: u64| quantity * 990_00 / 1000;
    assert_eq!(bench.balance(bond, member(0)).await, 1_010);
    assert_eq!(bench.balance(bond, member(1)).await, 1_000 - 10 + 5);
    assert_eq!(bench.balance(bond, member(2)).await, 1_000 - 5);
    assert_eq!(
        bench.balance(contracts.money, member(0)).await,
        1_000_000_00 - 10 * 990_00 - fee(10)
    );
    assert_eq!(
        bench.balance(contracts.money, member(1)).await,
        1_000_000_00 + 10 * 990_00 - 5 * 990_00 - fee(5)
    );
    assert_eq!(
        bench.balance(contracts.money, member(2)).await,
        1_000_000_00 + 5 * 990_00
    );
    assert_eq!(
        bench
            .balance(contracts.money, Address::of_user("system:fees"))
            .await,
        fee(10) + fee(5)
    );
    assert_eq!(
        (
            bench.supply(contracts.money).await,
            bench.supply(bond).await
        ),
        (3_000_000_00, 3_000)
    );
    // A later batch can contain the failed trade, but no settled one.
    let again = vec![trade(bond, 1, 0, 1, 10), trade(bond, 2, 1, 2, 1)];
    let receipt = bench
        .done(&Action::SettleTrades {
            settlement: contracts.settlement,
            id: "n1:4-5".into(),
            trades: again,
        })
        .await;
    let failed: Vec<_> = receipt
        .logs()
        .iter()
        .filter_map(|log| Settlement::TradeFailed::decode_log(&log.inner).ok())
        .collect();
    assert_eq!(
        failed
            .iter()
            .map(|failed| failed.tradeNumber.to::<u64>())
            .collect::<Vec<_>>(),
        [1]
    );
    assert_eq!(bench.balance(bond, member(0)).await, 1_010);
    bench.stop().await;
}

#[tokio::test]
async fn batch_is_accepted_once_and_by_the_operator_only() {
    let (mut bench, contracts, bond) = market(2).await;
    let batch = Action::SettleTrades {
        settlement: contracts.settlement,
        id: "n1:1-1".into(),
        trades: vec![trade(bond, 1, 0, 1, 10)],
    };
    bench.done(&batch).await;
    let repeated = Action::SettleTrades {
        settlement: contracts.settlement,
        id: "n1:1-1".into(),
        trades: vec![trade(bond, 2, 0, 1, 10)],
    };
    assert!(!bench.send(&repeated).await.status());
    assert_eq!(bench.balance(bond, member(0)).await, 1_010);
    // An outsider's call is refused before all other checks.
    let outsider = PrivateKeySigner::from_slice(&[9; 32]).expect("key");
    let call = batch.call();
    let request = alloy::rpc::types::TransactionRequest::default()
        .from(outsider.address())
        .to(contracts.settlement.raw())
        .input(Bytes::from(call.data).into());
    let error = bench.provider.call(request).await.expect_err("refused");
    let data = error
        .as_error_resp()
        .and_then(|payload| payload.as_revert_data())
        .expect("revert data");
    assert_eq!(
        data[..4],
        alloy::primitives::keccak256("MissingRole(address,uint256)")[..4]
    );
    bench.stop().await;
}

// rows: R100 R102 R104
#[tokio::test]
async fn r102_redemption_pays_holders_and_burns_the_issue() {
    let (mut bench, contracts, bond) = market(3).await;
    let account = Address::of_user("system:redemption");
    bench
        .done(&Action::RegisterIdentities {
            registry: contracts.registry,
            accounts: vec![account],
        })
        .await;
    let payouts: Vec<_> = (0..3)
        .map(|n| Payout {
            holder: member(n),
            units: 1_000,
            payment: 1_050_000,
        })
        .collect();
    let distribute = |part: u64, payouts: &[Payout]| Action::Distribute {
        redemption: contracts.redemption,
        id: "redemption-1".into(),
        part,
        token: bond,
        account,
        payouts: payouts.to_vec(),
    };
    let unfunded = bench.send(&distribute(0, &payouts)).await;
    assert!(!unfunded.status(), "under-funded: no distribution");
    assert_eq!(bench.supply(bond).await, 3_000);
    let before = bench.supply(contracts.money).await;
    bench
        .done(&Action::Transfer {
            token: contracts.money,
            from: member(0),
            to: account,
            units: 3_150_000,
        })
        .await;
    bench
        .done(&Action::SetFrozen {
            token: bond,
            account: member(2),
            frozen: true,
        })
        .await;
    bench.done(&distribute(0, &payouts[..2])).await;
    assert!(
        !bench.send(&distribute(0, &payouts[2..])).await.status(),
        "a part is accepted once"
    );
    bench.done(&distribute(1, &payouts[2..])).await;
    assert_eq!(bench.supply(bond).await, 0);
    assert_eq!(bench.supply(contracts.money).await, before);
    assert_eq!(bench.balance(contracts.money, account).await, 0);
    assert_eq!(
        bench.balance(contracts.money, member(1)).await,
        1_000_000_00 + 1_050_000
    );
    bench.stop().await;
}

#[tokio::test]
async fn issue_against_payment_is_one_exchange() {
    let (mut bench, contracts, bond) = market(2).await;
    let issue = |id: &str, payment| Action::IssueAgainstPayment {
        settlement: contracts.settlement,
        id: id.into(),
        token: bond,
        investor: member(0),
        units: 50,
        issuer: member(1),
        payment,
    };
    assert!(
        !bench.send(&issue("op-1", 2_000_000_00)).await.status(),
        "the balance is too low"
    );
    assert_eq!(bench.balance(bond, member(0)).await, 1_000);
    bench.done(&issue("op-1", 50_000_00)).await;
    assert!(
        !bench.send(&issue("op-1", 50_000_00)).await.status(),
        "an issue is accepted once"
    );
    assert_eq!(bench.balance(bond, member(0)).await, 1_050);
    assert_eq!(
        bench.balance(contracts.money, member(1)).await,
        1_050_000_00
    );
    assert_eq!(bench.supply(bond).await, 2_050);
    bench.stop().await;
}
