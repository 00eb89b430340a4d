//! Consumed events (specification 6.6): users, confirmed CFA operations, receipts.
//!
//! Each event is accepted once, in the transaction of its effects, together with the other events
//! of its batch. Its command is idempotent too: operations are keyed by the CFA operation, and
//! finality of an unknown operation is parked. A permanent refusal goes to the dead-letter topic at
//! once and does not block later events. While the store is unavailable events wait.

use std::sync::Arc;

use events::{BatchResult, Event, Poison, RetryLater, Stopped, topics};
use prost::Message;
use proto::{
    cfa::v1 as cfa,
    chain::v1 as chain,
    common::v1::{MonetaryAmount, RequestContext},
    convert,
    identity::v1 as identity,
};
use service_clients::{OperationType as CfaOperationType, cfa::Operation as CfaOperation};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use types::{CFA_RUB, subaccount};

use crate::{
    committer::{Committer, InboxCommand},
    fold::{Batch, Command, CommandKind, NewOperation, NewPosting, Target},
    model::{Amount, Id, OperationType},
    reconcile::Reconciler,
    refusal::Refusal,
};

const IDENTITY: &str = "ledger.identity";
const CFA: &str = "ledger.cfa";
const CHAIN: &str = "ledger.chain";
const BLOCKS: &str = "ledger.blocks";
/// Events per transaction.
const EVENTS_MAX: usize = 256;
/// Consumer groups of the ledger.
pub const GROUPS: [&str; 4] = [IDENTITY, CFA, CHAIN, BLOCKS];

/// Spawns the consumer of chain blocks that restores missed operations.
pub fn spawn_reconciler(
    log: Arc<dyn events::Log>,
    reconciler: Reconciler,
    tasks: &TaskTracker,
    shutdown: CancellationToken,
) {
    let reconciler = Arc::new(reconciler);
    let retrying = reconciler.clone();
    tasks.spawn(async move { retrying.retry_open().await });
    tasks.spawn(async move {
        let handler = |events: Vec<Event>| {
            let reconciler = reconciler.clone();
            async move { reconciler.handle(&events).await }
        };
        let topics = [topics::CHAIN];
        let consumed = events::consume_batches(log, BLOCKS, &topics, EVENTS_MAX, handler, shutdown);
        if let Err(error) = consumed.await {
            tracing::error!(%error, group = BLOCKS, "consumer stopped");
        }
    });
}

/// Spawns one consumer per topic.
pub fn spawn(
    log: &Arc<dyn events::Log>,
    committer: &Committer,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) {
    for (group, topic) in [
        (IDENTITY, topics::IDENTITY),
        (CFA, topics::CFA),
        (CHAIN, topics::CHAIN),
    ] {
        let (log, shutdown) = (log.clone(), shutdown.clone());
        let committer = committer.clone();
        tasks.spawn(async move {
            let handler = move |events: Vec<Event>| {
                let committer = committer.clone();
                async move { handle(&committer, group, events).await }
            };
            if let Err(error) =
                events::consume_batches(log, group, &[topic], EVENTS_MAX, handler, shutdown).await
            {
                tracing::error!(%error, topic, "consumer stopped");
            }
        });
    }
}

/// Accepts events in one transaction, up to the first failure.
async fn handle(committer: &Committer, consumer: &'static str, events: Vec<Event>) -> BatchResult {
    let mut commands = Vec::new();
    let mut indices = Vec::new();
    let mut unreadable = None;
    for (index, event) in events.iter().enumerate() {
        match command_of(event) {
            Ok(None) => {}
            Ok(Some(command)) => {
                commands.push(inbox_command(event, command));
                indices.push(index);
            }
            Err(poison) => {
                unreadable = Some(Stopped {
                    handled: index,
                    error: poison.into(),
                });
                break;
            }
        }
    }
    if !commands.is_empty() {
        commit_events(committer, consumer, &events, commands, &indices).await?;
    }
    unreadable.map_or(Ok(()), Err)
}

fn inbox_command(
    event: &Event,
    (kind, context): (CommandKind, Option<RequestContext>),
) -> InboxCommand {
    let mut context = rpc::context::record_read_context(context);
    if !event.correlation_id.is_empty() {
        context.correlation_id.clone_from(&event.correlation_id);
    }
    InboxCommand {
        event_id: event.id,
        command: Command {
            kind,
            key: None,
            is_service: true,
            author: None,
        },
        context,
    }
}

/// Commits commands of events. `indices` contains the index of each command's event.
async fn commit_events(
    committer: &Committer,
    consumer: &'static str,
    events: &[Event],
    commands: Vec<InboxCommand>,
    indices: &[usize],
) -> BatchResult {
    let stopped = |handled: usize, error| Err(Stopped { handled, error });
    let outcomes = match committer.accept_events(consumer, commands).await {
        Ok(outcomes) => outcomes,
        Err(error) if error.is_away() => {
            return stopped(indices[0], RetryLater(error.to_string()).into());
        }
        Err(error) => return stopped(indices[0], error.into()),
    };
    for (index, outcome) in indices.iter().zip(outcomes) {
        let Err(refused) = outcome else { continue };
        let refusal = refused.refusal;
        // The registration of the instrument has not arrived yet: retry.
        if refusal == Refusal::InstrumentNotFound {
            return stopped(*index, refusal.to_string().into());
        }
        let event_type = &events[*index].type_name;
        tracing::error!(event_type, %refusal, "event refused by the ledger");
        return stopped(*index, Poison(refusal.to_string()).into());
    }
    Ok(())
}

type EventCommand = Option<(CommandKind, Option<RequestContext>)>;

fn read<M: Message + Default>(event: &Event) -> Result<M, Poison> {
    M::decode(event.payload.as_slice())
        .map_err(|error| Poison(format!("payload is not a {}: {error}", event.type_name)))
}

fn required(field: &str, text: String) -> Result<Id, Poison> {
    if text.is_empty() {
        return Err(Poison(format!("{field} is empty")));
    }
    if text.chars().any(char::is_control) {
        return Err(Poison(format!("{field} has control characters")));
    }
    Ok(text.into())
}

fn hash(text: &str) -> Option<Id> {
    (!text.is_empty()).then(|| text.to_ascii_lowercase().into())
}

/// Returns the command of an event; `None` if the ledger ignores it.
fn command_of(event: &Event) -> Result<EventCommand, Poison> {
    let name = event.short_type();
    Ok(match name.strip_suffix("Event").unwrap_or(name) {
        "UserCreated" => {
            let user: identity::UserCreatedEvent = read(event)?;
            let user_id = required("user_id", user.user_id)?;
            Some((CommandKind::CreateUser { user_id }, user.context))
        }
        "UserBlocked" => {
            let user: identity::UserBlockedEvent = read(event)?;
            let user_id = required("user_id", user.user_id)?;
            Some((
                CommandKind::BlockUser {
                    user_id,
                    blocked: true,
                },
                user.context,
            ))
        }
        "UserUnblocked" => {
            let user: identity::UserUnblockedEvent = read(event)?;
            let user_id = required("user_id", user.user_id)?;
            Some((
                CommandKind::BlockUser {
                    user_id,
                    blocked: false,
                },
                user.context,
            ))
        }
        "InstrumentRegistered" => {
            let instrument: cfa::InstrumentRegisteredEvent = read(event)?;
            let decimals = u8::try_from(instrument.decimals)
                .map_err(|_| Poison("decimals must be at most 18".to_owned()))?;
            let instrument_id = required("instrument_id", instrument.instrument_id)?;
            Some((
                CommandKind::RegisterInstrument {
                    instrument_id,
                    decimals,
                },
                instrument.context,
            ))
        }
        "CfaIssued" => issued(read(event)?)?,
        "CfaRedeemed" => {
            let redeemed: cfa::CfaRedeemedEvent = read(event)?;
            Some(confirmed(
                OperationType::Redemption,
                redeemed.operation_id,
                &redeemed.tx_hash,
                redeemed.context,
            )?)
        }
        "CfaTransferred" => transferred(read(event)?)?,
        "TransactionReceiptReady" => {
            let receipt: chain::TransactionReceiptReadyEvent = read(event)?;
            let reverted = match chain::ReceiptStatus::try_from(receipt.status) {
                Ok(chain::ReceiptStatus::Success) => false,
                Ok(chain::ReceiptStatus::Reverted) => true,
                _ => return Err(Poison("receipt has no status".to_owned())),
            };
            let tx_hash = required("tx_hash", receipt.tx_hash.to_ascii_lowercase())?;
            Some((CommandKind::Receipt { tx_hash, reverted }, receipt.context))
        }
        // BlockRead is handled by the reconciler, in its own group.
        _ => None,
    })
}

/// Returns the command of the event that the CFA service publishes for this operation.
pub fn command_kind_of(operation: CfaOperation) -> Result<Option<CommandKind>, Poison> {
    let amount = Some(MonetaryAmount {
        currency_code: operation.instrument_id.clone(),
        amount: operation.amount.map(convert::to_decimal),
    });
    let command = match operation.operation_type {
        Some(CfaOperationType::Issuance) => issued(cfa::CfaIssuedEvent {
            operation_id: operation.operation_id,
            instrument_id: operation.instrument_id,
            holder_id: operation.user_id,
            amount,
            tx_hash: operation.tx_hash,
            ..Default::default()
        })?,
        Some(CfaOperationType::Redemption) => Some(confirmed(
            OperationType::Redemption,
            operation.operation_id,
            &operation.tx_hash,
            None,
        )?),
        Some(CfaOperationType::P2pTransfer) => transferred(cfa::CfaTransferredEvent {
            operation_id: operation.operation_id,
            instrument_id: operation.instrument_id,
            from_user_id: operation.from_user_id,
            to_user_id: operation.to_user_id,
            amount,
            tx_hash: operation.tx_hash,
            trade_id: operation.trade_id,
            ..Default::default()
        })?,
        _ => None,
    };
    Ok(command.map(|(kind, _)| kind))
}

/// Returns the transaction hashes of a block; none for another event.
pub fn transactions_of(event: &Event) -> Result<Vec<String>, Poison> {
    if event.short_type() != "BlockReadEvent" {
        return Ok(Vec::new());
    }
    let block: chain::BlockReadEvent = read(event)?;
    Ok(block.tx_hashes)
}

/// The command for finality of an operation that another service posted.
fn confirmed(
    kind: OperationType,
    operation_id: String,
    tx_hash: &str,
    context: Option<RequestContext>,
) -> Result<(CommandKind, Option<RequestContext>), Poison> {
    let external_ref = required("operation_id", operation_id)?;
    let kind = CommandKind::Confirm {
        targets: vec![Target::Reference { kind, external_ref }],
        tx_hash: hash(tx_hash),
    };
    Ok((kind, context))
}

/// CFA-RUB: posts the deposit (D21). Other instruments: makes the issuance final, which the CFA
/// service posted.
fn issued(event: cfa::CfaIssuedEvent) -> Result<EventCommand, Poison> {
    if event.instrument_id != CFA_RUB {
        return confirmed(
            OperationType::Issuance,
            event.operation_id,
            &event.tx_hash,
            event.context,
        )
        .map(Some);
    }
    let posting = NewPosting {
        debit_subaccount_id: subaccount::reserve(CFA_RUB).into(),
        credit_subaccount_id: subaccount::of_user(&event.holder_id, CFA_RUB).into(),
        amount: amount(event.amount.as_ref(), CFA_RUB)?,
        hold_id: None,
        unsettled: false,
    };
    let operation = final_operation(
        OperationType::Deposit,
        required("holder_id", event.holder_id)?,
        event.operation_id,
        &event.tx_hash,
        posting,
    )?;
    Ok(Some((post(operation), event.context)))
}

/// With a trade: makes its operations final (T11). Without: makes the transfer final, or posts it
/// if it is missing.
fn transferred(event: cfa::CfaTransferredEvent) -> Result<EventCommand, Poison> {
    let from = required("from_user_id", event.from_user_id)?;
    let to = required("to_user_id", event.to_user_id)?;
    if !event.trade_id.is_empty() {
        let target = |user_id: &Id, suffix: &str| Target::Key {
            user_id: user_id.clone(),
            key: format!("{}{suffix}", event.trade_id).into(),
        };
        let targets = vec![target(&to, ""), target(&from, ":sell"), target(&to, ":fee")];
        let tx_hash = hash(&event.tx_hash);
        return Ok(Some((
            CommandKind::Confirm { targets, tx_hash },
            event.context,
        )));
    }
    let posting = NewPosting {
        debit_subaccount_id: subaccount::of_user(&from, &event.instrument_id).into(),
        credit_subaccount_id: subaccount::of_user(&to, &event.instrument_id).into(),
        amount: amount(event.amount.as_ref(), &event.instrument_id)?,
        hold_id: None,
        unsettled: false,
    };
    let operation = final_operation(
        OperationType::P2pTransfer,
        from,
        event.operation_id,
        &event.tx_hash,
        posting,
    )?;
    Ok(Some((post(operation), event.context)))
}

fn amount(value: Option<&MonetaryAmount>, instrument_id: &str) -> Result<Amount, Poison> {
    let (_, value) =
        convert::monetary_amount(value).map_err(|error| Poison(format!("amount {error}")))?;
    Ok(Amount {
        instrument_id: instrument_id.into(),
        value,
    })
}

/// An operation confirmed by the chain, keyed by the CFA operation.
fn final_operation(
    kind: OperationType,
    user_id: Id,
    operation_id: String,
    tx_hash: &str,
    posting: NewPosting,
) -> Result<NewOperation, Poison> {
    let external_ref = required("operation_id", operation_id)?;
    Ok(NewOperation {
        operation_id: None,
        kind,
        user_id,
        idempotency_key: external_ref.clone(),
        external_ref: Some(external_ref),
        tx_hash: hash(tx_hash),
        awaits_chain: false,
        postings: vec![posting],
        digest: 0,
        is_final: true,
    })
}

fn post(operation: NewOperation) -> CommandKind {
    CommandKind::Post(Batch {
        operations: vec![Ok(operation)],
        from_event: true,
        ..Batch::default()
    })
}
