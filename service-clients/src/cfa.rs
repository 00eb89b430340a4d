//! Client of the CFA service: instruments, operations, chain batches of trades.

use async_recursion::async_recursion as boxed;
use prost::Message;
use proto::cfa::v1 as pb;
use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use proto::common::v1 as common;
use proto::convert::{optional_decimal, to_decimal};
use rpc::Context;
use types::{Decimal, Id128, InstrumentId, UserId};

use crate::convert::{number, number_or_zero};
use crate::policy::{all_pages, call, client, not_found_as_none};
use crate::{Answer, CallError, OperationStatus, OperationType};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstrumentStatus {
    Draft,
    Active,
    Halted,
    /// Matured or redeemed: no longer traded.
    Ended,
}

/// An instrument of the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instrument {
    pub instrument_id: String,
    pub decimals: u32,
    pub status: InstrumentStatus,
    pub tick_size: Option<Decimal>,
    pub lot_size: Option<Decimal>,
    pub band_low: Option<Decimal>,
    pub band_high: Option<Decimal>,
    /// A money claim (CFA-RUB). Not traded.
    pub is_money: bool,
    /// Units counted against the limit of the issue. `None` if the service does not report it.
    pub issued: Option<Decimal>,
}

/// An operation of the CFA service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    pub operation_id: String,
    /// `None` for a type unknown to this release.
    pub operation_type: Option<OperationType>,
    pub status: Option<OperationStatus>,
    pub user_id: String,
    pub instrument_id: String,
    /// `None` for an unreadable amount.
    pub amount: Option<Decimal>,
    pub external_ref: String,
    pub from_user_id: String,
    pub to_user_id: String,
    pub trade_id: String,
    pub tx_hash: String,
    /// Block of its transaction; 0 until the transaction is in a block.
    pub block_number: u64,
}

/// Filter of an operation list. An empty filter selects all operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct OperationFilter<'a> {
    pub operation_type: Option<OperationType>,
    pub external_ref: &'a str,
    pub tx_hashes: &'a [String],
    pub exclude_trades: bool,
}

/// On-chain balance of an instrument at one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Empty for an address without a user.
    pub user_id: String,
    pub address: String,
    pub balance: Decimal,
}

/// A holder of the registry, with the balance that the chain has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainBalance {
    /// Empty for an address without a user.
    pub user_id: String,
    pub address: String,
    pub on_chain: Decimal,
    pub in_registry: Decimal,
}

/// An anchor of the ledger and of all audit records on the chain. Call data in hex.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anchor {
    pub number: u64,
    pub tx_hash: String,
    pub data: String,
    /// Empty: the transaction is not final.
    pub on_chain: String,
}

/// A token transfer in the chain's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainTransfer {
    /// Empty for a token that is not an instrument.
    pub instrument_id: String,
    /// Empty for an issue.
    pub from_address: String,
    /// Empty for a burn.
    pub to_address: String,
    pub quantity: Decimal,
}

/// Token transfers of a range of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainTransfers {
    pub transfers: Vec<ChainTransfer>,
    /// Last block of the range.
    pub through_block: u64,
    /// Last block of the chain.
    pub last_block: u64,
}

/// A trade in a chain batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trade {
    pub trade_id: Id128,
    pub instrument_id: InstrumentId,
    /// Dense per instrument, from 1.
    pub trade_number: u64,
    pub buyer_id: UserId,
    pub seller_id: UserId,
    pub quantity: Decimal,
    pub payment: Decimal,
    pub fee: Decimal,
}

/// Trades of one chain transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TradeBatch {
    pub batch_id: String,
    pub trades: Vec<Trade>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TradeBatchStatus {
    Submitted,
    Finalized,
    Failed,
}

/// State of a batch on chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TradeBatchState {
    pub status: TradeBatchStatus,
    pub tx_hash: String,
    /// Trades that the contract skipped.
    pub failed: Vec<Id128>,
}

client! {
    /// Client of the CFA service.
    CfaClient, CfaRegistryServiceClient, "CFA service"
}

impl CfaClient {
    /// All instruments of the registry.
    #[boxed]
    pub async fn instruments(&self, context: &Context) -> Answer<Vec<Instrument>> {
        all_pages(|pagination| {
            let request = pb::ListInstrumentsRequest {
                context: self.peer.context(context),
                status: pb::InstrumentStatus::Unspecified.into(),
                pagination,
            };
            async move {
                let page = self.peer.call(request, call!(list_instruments)).await?;
                let read = page
                    .instruments
                    .into_iter()
                    .map(|one| self.instrument_of(one));
                Ok((read.collect::<Result<_, _>>()?, page.pagination))
            }
        })
        .await
    }

    /// An instrument of the registry; `None` for an unknown id.
    #[boxed]
    pub async fn instrument(&self, context: &Context, id: &str) -> Answer<Option<Instrument>> {
        let request = pb::GetInstrumentRequest {
            context: self.peer.context(context),
            instrument_id: id.to_owned(),
        };
        let answer = not_found_as_none(self.peer.call(request, call!(get_instrument)).await)?;
        let instrument = answer.and_then(|answer| answer.instrument);
        instrument.map(|one| self.instrument_of(one)).transpose()
    }

    /// Total on-chain supply of an instrument, and the block at which it was read (D22).
    #[boxed]
    pub async fn supply(&self, context: &Context, instrument_id: &str) -> Answer<(Decimal, u64)> {
        let request = pb::GetSupplyRequest {
            context: self.peer.context(context),
            instrument_id: instrument_id.to_owned(),
        };
        let answer = self.peer.call(request, call!(get_supply)).await?;
        let total = number(answer.total_supply.as_ref());
        let total = total.map_err(|what| self.peer.malformed_response(what))?;
        Ok((total, answer.block_number))
    }

    /// On-chain holders of an instrument. `on_page` receives the number of rows of each page.
    #[boxed]
    pub async fn holders(
        &self,
        context: &Context,
        instrument_id: &str,
        on_page: &(dyn Fn(usize) + Sync),
    ) -> Answer<Vec<Holder>> {
        all_pages(|pagination| {
            let request = pb::ListHoldersRequest {
                context: self.peer.context(context),
                instrument_id: instrument_id.to_owned(),
                pagination,
                ..Default::default()
            };
            async move {
                let page = self.peer.call(request, call!(list_holders)).await?;
                on_page(page.holders.len());
                let holders = page.holders.into_iter().map(|holder| {
                    let balance = number_or_zero(holder.balance.as_ref());
                    Ok(Holder {
                        balance: balance.map_err(|what| self.peer.malformed_response(what))?,
                        user_id: holder.user_id,
                        address: holder.address,
                    })
                });
                Ok((holders.collect::<Result<_, _>>()?, page.pagination))
            }
        })
        .await
    }

    /// Holders of an instrument in the registry, with their balances on the chain. `on_page`
    /// receives the number of rows of each page.
    #[boxed]
    pub async fn chain_balances(
        &self,
        context: &Context,
        instrument_id: &str,
        on_page: &(dyn Fn(usize) + Sync),
    ) -> Answer<Vec<ChainBalance>> {
        all_pages(|pagination| {
            let request = pb::ListChainBalancesRequest {
                context: self.peer.context(context),
                instrument_id: instrument_id.to_owned(),
                pagination,
            };
            async move {
                let page = self.peer.call(request, call!(list_chain_balances)).await?;
                on_page(page.balances.len());
                let balances = page.balances.into_iter().map(|balance| {
                    let on_chain = number(balance.on_chain.as_ref());
                    let registered = number_or_zero(balance.in_registry.as_ref());
                    let malformed = |what| self.peer.malformed_response(what);
                    Ok(ChainBalance {
                        on_chain: on_chain.map_err(malformed)?,
                        in_registry: registered.map_err(malformed)?,
                        user_id: balance.user_id,
                        address: balance.address,
                    })
                });
                Ok((balances.collect::<Result<_, _>>()?, page.pagination))
            }
        })
        .await
    }

    /// All anchors, newest first.
    #[boxed]
    pub async fn anchors(&self, context: &Context) -> Answer<Vec<Anchor>> {
        all_pages(|pagination| {
            let request = pb::ListAnchorsRequest {
                context: self.peer.context(context),
                pagination,
            };
            async move {
                let page = self.peer.call(request, call!(list_anchors)).await?;
                let anchors = page.anchors.into_iter().map(|anchor| Anchor {
                    number: anchor.number,
                    tx_hash: anchor.tx_hash,
                    data: anchor.data,
                    on_chain: anchor.on_chain,
                });
                Ok((anchors.collect(), page.pagination))
            }
        })
        .await
    }

    /// Token transfers from `from_block` on, up to the service's limit per answer.
    #[boxed]
    pub async fn chain_transfers(
        &self,
        context: &Context,
        from_block: u64,
    ) -> Answer<ChainTransfers> {
        let request = pb::ReplayChainTransfersRequest {
            context: self.peer.context(context),
            from_block,
        };
        let part = self
            .peer
            .call(request, call!(replay_chain_transfers))
            .await?;
        let transfers = part.transfers.into_iter().map(|transfer| {
            let quantity = number_or_zero(transfer.quantity.as_ref());
            Ok(ChainTransfer {
                quantity: quantity.map_err(|what| self.peer.malformed_response(what))?,
                instrument_id: transfer.instrument_id,
                from_address: transfer.from_address,
                to_address: transfer.to_address,
            })
        });
        Ok(ChainTransfers {
            transfers: transfers.collect::<Result<_, _>>()?,
            through_block: part.through_block,
            last_block: part.last_block,
        })
    }

    /// All operations that match the filter, newest first.
    #[boxed]
    pub async fn operations<'a: 'async_recursion>(
        &self,
        context: &Context,
        filter: OperationFilter<'a>,
    ) -> Answer<Vec<Operation>> {
        all_pages(|pagination| {
            let request = pb::ListOperationsRequest {
                context: self.peer.context(context),
                r#type: filter.operation_type.map_or(0, OperationType::code),
                external_ref: filter.external_ref.to_owned(),
                onchain_tx_hashes: filter.tx_hashes.to_vec(),
                without_trades: filter.exclude_trades,
                pagination,
                ..Default::default()
            };
            async move {
                let page = self.peer.call(request, call!(list_operations)).await?;
                let operations = page.operations.into_iter().map(operation_of).collect();
                Ok((operations, page.pagination))
            }
        })
        .await
    }

    /// Submits a batch to the chain. Idempotent by batch id.
    #[boxed]
    pub async fn settle_trades(&self, context: &Context, batch: &TradeBatch) -> Answer<()> {
        let key = format!("{}:{}", self.peer.source, batch.batch_id);
        let request = batch.to_request(self.peer.keyed(context, &key));
        self.peer.send(request, call!(settle_trades)).await
    }

    /// State of a batch; waits up to `wait_ms` for its outcome.
    #[boxed]
    pub async fn trade_batch(
        &self,
        context: &Context,
        batch_id: &str,
        wait_ms: u32,
    ) -> Answer<TradeBatchState> {
        let request = pb::GetTradeBatchRequest {
            context: self.peer.context(context),
            batch_id: batch_id.to_owned(),
            wait_ms,
        };
        let answer = self.peer.call(request, call!(get_trade_batch)).await?;
        let batch = answer.batch.unwrap_or_default();
        let failed = batch.failed_trade_ids.iter().map(|id| Id128::parse(id));
        let failed = failed.collect::<Option<_>>();
        Ok(TradeBatchState {
            status: match batch.status() {
                pb::TradeBatchStatus::Finalized => TradeBatchStatus::Finalized,
                pb::TradeBatchStatus::Failed => TradeBatchStatus::Failed,
                pb::TradeBatchStatus::Submitted | pb::TradeBatchStatus::Unspecified => {
                    TradeBatchStatus::Submitted
                }
            },
            tx_hash: batch.onchain_tx_hash,
            failed: failed.ok_or_else(|| self.peer.malformed_response("trade id is not a UUID"))?,
        })
    }

    fn instrument_of(&self, instrument: pb::Instrument) -> Result<Instrument, CallError> {
        let number = |value: &Option<common::Decimal>| {
            optional_decimal(value.as_ref()).map_err(|error| {
                self.peer
                    .malformed_response(format!("unreadable number: {error}"))
            })
        };
        Ok(Instrument {
            decimals: instrument.decimals,
            status: match instrument.status() {
                pb::InstrumentStatus::Active => InstrumentStatus::Active,
                pb::InstrumentStatus::Halted => InstrumentStatus::Halted,
                pb::InstrumentStatus::Matured | pb::InstrumentStatus::Redeemed => {
                    InstrumentStatus::Ended
                }
                pb::InstrumentStatus::Draft | pb::InstrumentStatus::Unspecified => {
                    InstrumentStatus::Draft
                }
            },
            is_money: instrument.r#type() == common::InstrumentType::MoneyClaim,
            tick_size: number(&instrument.tick_size)?,
            lot_size: number(&instrument.lot_size)?,
            band_low: number(&instrument.price_band_low)?,
            band_high: number(&instrument.price_band_high)?,
            issued: number(&instrument.issued)?,
            instrument_id: instrument.instrument_id,
        })
    }
}

fn operation_of(operation: pb::CfaOperation) -> Operation {
    Operation {
        operation_type: OperationType::from_code(operation.r#type),
        status: OperationStatus::from_code(operation.status),
        amount: number(operation.amount.as_ref()).ok(),
        operation_id: operation.operation_id,
        user_id: operation.user_id,
        instrument_id: operation.instrument_id,
        external_ref: operation.external_ref,
        from_user_id: operation.from_user_id,
        to_user_id: operation.to_user_id,
        trade_id: operation.trade_id,
        tx_hash: operation.onchain_tx_hash,
        block_number: operation.block_number,
    }
}

impl TradeBatch {
    /// Encodes the batch for a store. [`TradeBatch::from_bytes`] decodes it.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.to_request(None).encode_to_vec()
    }

    /// Decodes a stored batch. `None` if the bytes are not a batch.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let request = pb::SettleTradesRequest::decode(bytes).ok()?;
        Some(Self {
            batch_id: request.batch_id,
            trades: request.trades.iter().map(trade_of).collect::<Option<_>>()?,
        })
    }

    fn to_request(&self, context: Option<common::RequestContext>) -> pb::SettleTradesRequest {
        pb::SettleTradesRequest {
            context,
            batch_id: self.batch_id.clone(),
            trades: self.trades.iter().map(trade_leg).collect(),
        }
    }
}

fn trade_leg(trade: &Trade) -> pb::TradeLeg {
    pb::TradeLeg {
        trade_id: trade.trade_id.to_string(),
        instrument_id: trade.instrument_id.to_string(),
        trade_number: trade.trade_number,
        buyer_id: trade.buyer_id.to_string(),
        seller_id: trade.seller_id.to_string(),
        quantity: Some(to_decimal(trade.quantity)),
        payment: Some(to_decimal(trade.payment)),
        fee: Some(to_decimal(trade.fee)),
    }
}

fn trade_of(leg: &pb::TradeLeg) -> Option<Trade> {
    Some(Trade {
        trade_id: Id128::parse(&leg.trade_id)?,
        instrument_id: InstrumentId::new(&leg.instrument_id).ok()?,
        trade_number: leg.trade_number,
        buyer_id: UserId::new(&leg.buyer_id).ok()?,
        seller_id: UserId::new(&leg.seller_id).ok()?,
        quantity: number(leg.quantity.as_ref()).ok()?,
        payment: number(leg.payment.as_ref()).ok()?,
        fee: number_or_zero(leg.fee.as_ref()).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_of_trades_round_trips_through_its_stored_bytes() {
        let batch = TradeBatch {
            batch_id: "1:4-9".to_owned(),
            trades: vec![Trade {
                trade_id: Id128::from_u128(7),
                instrument_id: InstrumentId::new("BOND-1").unwrap(),
                trade_number: 3,
                buyer_id: UserId::new("ann").unwrap(),
                seller_id: UserId::new("bob").unwrap(),
                quantity: "1.500".parse().unwrap(),
                payment: "100.00".parse().unwrap(),
                fee: "0.10".parse().unwrap(),
            }],
        };
        let bytes = batch.to_bytes();
        assert_eq!(TradeBatch::from_bytes(&bytes), Some(batch.clone()));
        assert_eq!(TradeBatch::from_bytes(b"\xff"), None);
        let mut leg = trade_leg(&batch.trades[0]);
        assert_eq!(leg.payment.as_ref().unwrap().value, "100.00");
        leg.trade_id = "7".to_owned();
        assert_eq!(trade_of(&leg), None);
    }

    #[test]
    fn an_operation_of_a_later_release_has_no_type_but_is_read() {
        let read = operation_of(pb::CfaOperation {
            r#type: 99,
            status: OperationStatus::Finalized.code(),
            ..Default::default()
        });
        assert_eq!(read.operation_type, None);
        assert_eq!(read.status, Some(OperationStatus::Finalized));
        assert_eq!(read.amount, None);
    }
}
