//! The instrument registry as the market uses it.

use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use proto::cfa::v1::{GetInstrumentRequest, Instrument, InstrumentStatus, ListInstrumentsRequest};
use proto::common::v1::{InstrumentType, PaginationRequest};
use proto::convert::optional_decimal;
use rpc::Context;
use tonic::{Code, Status};
use types::Decimal;

const PAGE_SIZE: i32 = 1_000;

/// Where an instrument stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListedStatus {
    Draft,
    Active,
    Halted,
    /// Matured or redeemed: nothing is traded any more.
    Ended,
}

/// An instrument as registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub instrument_id: String,
    pub decimals: u32,
    pub status: ListedStatus,
    pub tick_size: Option<Decimal>,
    pub lot_size: Option<Decimal>,
    pub band_low: Option<Decimal>,
    pub band_high: Option<Decimal>,
    /// CFA-RUB: money, not a thing to trade.
    pub is_money: bool,
}

#[derive(Clone)]
pub struct Cfa {
    client: CfaRegistryServiceClient<rpc::Channel>,
}

impl Cfa {
    pub fn new(channel: rpc::Channel) -> Self {
        Self {
            client: CfaRegistryServiceClient::new(channel),
        }
    }

    /// Every instrument of the registry.
    pub async fn list(&self, context: &Context) -> Result<Vec<Listed>, Status> {
        let mut listed = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = ListInstrumentsRequest {
                context: Some(context.child("market", "").to_proto()),
                status: InstrumentStatus::Unspecified.into(),
                pagination: Some(PaginationRequest {
                    page_size: PAGE_SIZE,
                    page_token,
                }),
            };
            let answer = self.client.clone().list_instruments(request).await;
            let answer = answer?.into_inner();
            for instrument in answer.instruments {
                listed.push(read(instrument)?);
            }
            page_token = answer
                .pagination
                .map(|page| page.next_page_token)
                .unwrap_or_default();
            if page_token.is_empty() {
                return Ok(listed);
            }
        }
    }

    /// `None` for an id nobody has registered.
    pub async fn get(&self, context: &Context, id: &str) -> Result<Option<Listed>, Status> {
        let request = GetInstrumentRequest {
            context: Some(context.child("market", "").to_proto()),
            instrument_id: id.to_owned(),
        };
        match self.client.clone().get_instrument(request).await {
            Ok(answer) => answer.into_inner().instrument.map(read).transpose(),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }
}

fn read(instrument: Instrument) -> Result<Listed, Status> {
    let number = |value: Option<&proto::common::v1::Decimal>| {
        optional_decimal(value).map_err(|error| rpc::status::internal(&error))
    };
    Ok(Listed {
        decimals: instrument.decimals,
        status: match instrument.status() {
            InstrumentStatus::Active => ListedStatus::Active,
            InstrumentStatus::Halted => ListedStatus::Halted,
            InstrumentStatus::Matured | InstrumentStatus::Redeemed => ListedStatus::Ended,
            InstrumentStatus::Draft | InstrumentStatus::Unspecified => ListedStatus::Draft,
        },
        is_money: instrument.r#type() == InstrumentType::MoneyClaim,
        tick_size: number(instrument.tick_size.as_ref())?,
        lot_size: number(instrument.lot_size.as_ref())?,
        band_low: number(instrument.price_band_low.as_ref())?,
        band_high: number(instrument.price_band_high.as_ref())?,
        instrument_id: instrument.instrument_id,
    })
}
