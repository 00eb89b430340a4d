//! CFA service double: instruments and operations that the test adds, and batches that settle at
//! once.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use proto::cfa::v1::cfa_registry_service_server::{CfaRegistryService, CfaRegistryServiceServer};
use proto::cfa::v1::*;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::unimplemented_methods;
use crate::messages::tx_hash;

/// Settles each batch id once.
#[derive(Default)]
pub struct Registry {
    /// File of settled batches, so that they survive a killed process.
    file: Option<PathBuf>,
    pub instruments: Mutex<HashMap<String, Instrument>>,
    pub operations: Mutex<Vec<CfaOperation>>,
    pub state: Mutex<ChainState>,
    /// Trade numbers skipped in every batch whose id does not end in `/2`.
    pub left_out_once: Mutex<HashSet<u64>>,
    /// Trade numbers always skipped.
    pub left_out: Mutex<HashSet<u64>>,
    /// Number of further batches to refuse as `UNAVAILABLE`.
    pub away: Mutex<u32>,
    /// Refuses whole batches while set.
    pub refusal: Mutex<Option<Status>>,
    /// Refuses every batch with one of these trades.
    pub refused_trades: Mutex<HashSet<String>>,
    /// Trade numbers skipped while the trade with the other number has not moved.
    pub left_out_before: Mutex<HashMap<u64, u64>>,
    /// Batches with more trades revert as a whole.
    trades_max: Option<usize>,
}

/// Marks in the file a trade that its batch left out, and a batch that reverted.
const FAILED: char = '!';

#[derive(Default)]
pub struct ChainState {
    /// In order of arrival: batch id and trade ids.
    pub batches: Vec<(String, Vec<String>)>,
    pub legs: BTreeMap<String, TradeLeg>,
    pub failed: BTreeMap<String, Vec<String>>,
    /// Ids of batches that reverted as a whole.
    pub reverted: HashSet<String>,
}

impl ChainState {
    /// Whether the trade with this number has moved.
    fn has_moved(&self, number: u64) -> bool {
        let is_moved = |(id, trades): &(String, Vec<String>)| {
            trades.iter().any(|trade| {
                let is_same = |leg: &TradeLeg| leg.trade_number == number;
                self.legs.get(trade).is_some_and(is_same) && !self.failed[id].contains(trade)
            })
        };
        self.batches.iter().any(is_moved)
    }
}

impl Registry {
    /// File in the folder of a registry: batches with more trades than its number revert.
    pub const TRADES_MAX: &str = "chain-trades-max";

    /// A registry that keeps its settled batches in a file of this folder.
    pub fn open(folder: &Path) -> Arc<Self> {
        let trades_max = std::fs::read_to_string(folder.join(Self::TRADES_MAX)).ok();
        let trades_max = trades_max.map(|text| text.parse::<usize>().expect("a number"));
        let file = folder.join("chain.log");
        let mut state = ChainState::default();
        for line in std::fs::read_to_string(&file).unwrap_or_default().lines() {
            let mut words = line.split(' ').map(str::to_owned);
            let marked_id = words.next().expect("an id");
            let id = marked_id.trim_start_matches(FAILED).to_owned();
            if marked_id != id {
                state.reverted.insert(id.clone());
            }
            let (mut trades, mut failed) = (Vec::new(), Vec::new());
            for word in words {
                match word.strip_prefix(FAILED) {
                    Some(trade) => failed.push(trade.to_owned()),
                    None => trades.push(word),
                }
            }
            trades.extend(failed.iter().cloned());
            state.failed.insert(id.clone(), failed);
            state.batches.push((id, trades));
        }
        Arc::new(Self {
            file: Some(file),
            state: Mutex::new(state),
            trades_max,
            ..Self::default()
        })
    }

    pub fn list(&self, instrument: Instrument) {
        let id = instrument.instrument_id.clone();
        self.instruments.lock().unwrap().insert(id, instrument);
    }

    pub fn routes(self: &Arc<Self>) -> Routes {
        Routes::new(CfaRegistryServiceServer::from_arc(self.clone()))
    }

    /// Trades moved on chain, with the number of moves.
    pub fn moved(&self) -> BTreeMap<String, u32> {
        let state = self.state.lock().unwrap();
        let mut moved = BTreeMap::new();
        for (id, trades) in &state.batches {
            for trade in trades
                .iter()
                .filter(|trade| !state.failed[id].contains(trade))
            {
                *moved.entry(trade.clone()).or_default() += 1;
            }
        }
        moved
    }

    /// Id of the batch that moved a trade.
    pub fn batch_of(&self, trade: &str) -> Option<String> {
        let state = self.state.lock().unwrap();
        let moved = |(id, trades): &&(String, Vec<String>)| {
            let has = |ids: &[String]| ids.iter().any(|known| known == trade);
            has(trades) && !has(&state.failed[id])
        };
        let batch = state.batches.iter().find(moved);
        batch.map(|(id, _)| id.clone())
    }

    fn batch(&self, id: &str) -> Option<TradeBatch> {
        let state = self.state.lock().unwrap();
        let (_, trades) = state.batches.iter().find(|(known, _)| known == id)?;
        let status = match state.reverted.contains(id) {
            true => TradeBatchStatus::Failed,
            false => TradeBatchStatus::Finalized,
        };
        Some(TradeBatch {
            batch_id: id.to_owned(),
            status: status.into(),
            onchain_tx_hash: tx_hash(id),
            block_number: 1,
            trades: trades.len() as u32,
            failed_trade_ids: state.failed[id].clone(),
            gas_used: 1,
        })
    }

    fn settle(&self, id: &str, legs: Vec<TradeLeg>) {
        let (once, always) = (
            self.left_out_once.lock().unwrap(),
            self.left_out.lock().unwrap(),
        );
        let before = self.left_out_before.lock().unwrap();
        let mut state = self.state.lock().unwrap();
        let is_reverted = self.trades_max.is_some_and(|max| legs.len() > max);
        let is_left_out = |number: &u64| {
            is_reverted
                || always.contains(number)
                || (!id.ends_with("/2") && once.contains(number))
                || before
                    .get(number)
                    .is_some_and(|other| !state.has_moved(*other))
        };
        let trades: Vec<String> = legs.iter().map(|leg| leg.trade_id.clone()).collect();
        let failed = legs.iter().filter(|leg| is_left_out(&leg.trade_number));
        let failed: Vec<String> = failed.map(|leg| leg.trade_id.clone()).collect();
        if let Some(file) = &self.file {
            let word = |trade: &String| match failed.contains(trade) {
                true => format!("{FAILED}{trade}"),
                false => trade.clone(),
            };
            let words: Vec<String> = trades.iter().map(word).collect();
            let mark = is_reverted.then_some(FAILED);
            let mark = mark.map_or_else(String::new, String::from);
            let file = std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(file);
            writeln!(file.unwrap(), "{mark}{id} {}", words.join(" ")).unwrap();
        }
        if is_reverted {
            state.reverted.insert(id.to_owned());
        }
        state.batches.push((id.to_owned(), trades));
        state.failed.insert(id.to_owned(), failed);
        state
            .legs
            .extend(legs.into_iter().map(|leg| (leg.trade_id.clone(), leg)));
    }
}

#[tonic::async_trait]
impl CfaRegistryService for Registry {
    async fn get_instrument(
        &self,
        request: Request<GetInstrumentRequest>,
    ) -> Result<Response<GetInstrumentResponse>, Status> {
        let instruments = self.instruments.lock().unwrap();
        match instruments
            .get(&request.into_inner().instrument_id)
            .cloned()
        {
            None => Err(rpc::status::not_found(
                "INSTRUMENT_NOT_FOUND",
                "Instrument not found",
            )),
            instrument => Ok(Response::new(GetInstrumentResponse { instrument })),
        }
    }

    async fn list_instruments(
        &self,
        _: Request<ListInstrumentsRequest>,
    ) -> Result<Response<ListInstrumentsResponse>, Status> {
        Ok(Response::new(ListInstrumentsResponse {
            instruments: self.instruments.lock().unwrap().values().cloned().collect(),
            pagination: None,
        }))
    }

    /// The listed operations of the request's transactions.
    async fn list_operations(
        &self,
        request: Request<ListOperationsRequest>,
    ) -> Result<Response<ListOperationsResponse>, Status> {
        let hashes = request.into_inner().onchain_tx_hashes;
        let mut operations = self.operations.lock().unwrap().clone();
        operations.retain(|operation| hashes.contains(&operation.onchain_tx_hash));
        Ok(Response::new(ListOperationsResponse {
            operations,
            pagination: None,
        }))
    }

    async fn settle_trades(
        &self,
        request: Request<SettleTradesRequest>,
    ) -> Result<Response<SettleTradesResponse>, Status> {
        let SettleTradesRequest {
            batch_id, trades, ..
        } = request.into_inner();
        {
            let mut away = self.away.lock().unwrap();
            if *away > 0 {
                *away -= 1;
                return Err(rpc::status::unavailable("Chain", 10));
            }
        }
        if let Some(refusal) = self.refusal.lock().unwrap().clone() {
            return Err(refusal);
        }
        let refused = self.refused_trades.lock().unwrap();
        if trades.iter().any(|leg| refused.contains(&leg.trade_id)) {
            return Err(rpc::status::invalid_argument("trades", "cannot be settled"));
        }
        drop(refused);
        if self.batch(&batch_id).is_none() {
            self.settle(&batch_id, trades);
        }
        let batch = self.batch(&batch_id);
        Ok(Response::new(SettleTradesResponse { batch }))
    }

    async fn get_trade_batch(
        &self,
        request: Request<GetTradeBatchRequest>,
    ) -> Result<Response<GetTradeBatchResponse>, Status> {
        match self.batch(&request.into_inner().batch_id) {
            None => Err(rpc::status::not_found(
                "BATCH_NOT_FOUND",
                "Trade batch not found",
            )),
            batch => Ok(Response::new(GetTradeBatchResponse { batch })),
        }
    }

    unimplemented_methods!(
        register_instrument: RegisterInstrumentRequest => RegisterInstrumentResponse,
        sign_issue_decision: SignIssueDecisionRequest => SignIssueDecisionResponse,
        activate_instrument: ActivateInstrumentRequest => ActivateInstrumentResponse,
        get_issue_decision: GetIssueDecisionRequest => GetIssueDecisionResponse,
        update_instrument: UpdateInstrumentRequest => UpdateInstrumentResponse,
        issue_cfa_rub: IssueCfaRubRequest => IssueCfaRubResponse,
        redeem_cfa_rub: RedeemCfaRubRequest => RedeemCfaRubResponse,
        subscribe: SubscribeRequest => SubscribeResponse,
        cancel_subscription: CancelSubscriptionRequest => CancelSubscriptionResponse,
        list_subscriptions: ListSubscriptionsRequest => ListSubscriptionsResponse,
        close_placement: ClosePlacementRequest => ClosePlacementResponse,
        issue_investment_cfa: IssueInvestmentCfaRequest => IssueInvestmentCfaResponse,
        offer_units: OfferUnitsRequest => OfferUnitsResponse,
        cancel_offer: CancelOfferRequest => CancelOfferResponse,
        list_offers: ListOffersRequest => ListOffersResponse,
        redeem_investment_cfa: RedeemInvestmentCfaRequest => RedeemInvestmentCfaResponse,
        start_redemption: StartRedemptionRequest => StartRedemptionResponse,
        get_redemption: GetRedemptionRequest => GetRedemptionResponse,
        list_coupons: ListCouponsRequest => ListCouponsResponse,
        restart_coupon: RestartCouponRequest => RestartCouponResponse,
        transfer_cfa: TransferCfaRequest => TransferCfaResponse,
        issue_extract: IssueExtractRequest => IssueExtractResponse,
        list_holders: ListHoldersRequest => ListHoldersResponse,
        list_chain_balances: ListChainBalancesRequest => ListChainBalancesResponse,
        list_chain_breaks: ListChainBreaksRequest => ListChainBreaksResponse,
        list_anchors: ListAnchorsRequest => ListAnchorsResponse,
        accept_chain_break: AcceptChainBreakRequest => AcceptChainBreakResponse,
        lift_quarantine: LiftQuarantineRequest => LiftQuarantineResponse,
        move_holders: MoveHoldersRequest => MoveHoldersResponse,
        get_holder_move: GetHolderMoveRequest => GetHolderMoveResponse,
        replay_chain_transfers: ReplayChainTransfersRequest => ReplayChainTransfersResponse,
        check_integrity: CheckIntegrityRequest => CheckIntegrityResponse,
        get_supply: GetSupplyRequest => GetSupplyResponse,
        get_operation: GetOperationRequest => GetOperationResponse,
        finalize_issuance: FinalizeIssuanceRequest => FinalizeIssuanceResponse,
        finalize_redemption: FinalizeRedemptionRequest => FinalizeRedemptionResponse,
        list_suspended_deposits: ListSuspendedDepositsRequest => ListSuspendedDepositsResponse,
        resolve_suspended_deposit: ResolveSuspendedDepositRequest => ResolveSuspendedDepositResponse,
        freeze_units: FreezeUnitsRequest => FreezeUnitsResponse,
        lift_freeze: LiftFreezeRequest => LiftFreezeResponse,
        force_transfer: ForceTransferRequest => ForceTransferResponse,
        list_enforcement_acts: ListEnforcementActsRequest => ListEnforcementActsResponse,
        set_redemption_block: SetRedemptionBlockRequest => SetRedemptionBlockResponse,
        refund_redemption: RefundRedemptionRequest => RefundRedemptionResponse,
        list_audit_records: ListAuditRecordsRequest => ListAuditRecordsResponse,
    );
}
