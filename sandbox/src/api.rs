//! Writes that act once per caller and idempotency key (D50): the answer is stored in the
//! transaction of the effect.

use events::calls::{self, Answered, CallKey};
use events::{Sqlite, Tx};
use prost::Message;
use rpc::context::Once;
use rpc::status::internal;
use tonic::{Response, Status};

/// A write that acts once per key: new, or repeated with the stored answer.
pub enum Begun<T> {
    New(Tx),
    Repeat(Response<T>),
}

/// Begins a write in a handler; returns the answer of a repeat.
macro_rules! begin {
    ($db:expr, $once:expr) => {
        match $crate::api::begin_write($db, $once).await? {
            $crate::api::Begun::New(tx) => tx,
            $crate::api::Begun::Repeat(answer) => return Ok(answer),
        }
    };
}
pub(crate) use begin;

/// A transaction, or the answer of the earlier call.
pub async fn begin_write<T: Message + Default>(
    db: &Sqlite,
    once: &Once,
) -> Result<Begun<T>, Status> {
    let mut tx = db.write().await.map_err(store_failed)?;
    let stored = calls::find(&mut *tx, &call_key(once)).await;
    match stored.map_err(store_failed)? {
        Some(stored) => Ok(Begun::Repeat(once.repeat(stored.digest, &stored.answer)?)),
        None => Ok(Begun::New(tx)),
    }
}

/// Commits a write together with its answer.
pub async fn commit<T: Message>(mut tx: Tx, once: &Once, answer: T) -> Result<Response<T>, Status> {
    let stored = Answered {
        digest: once.digest,
        answer: answer.encode_to_vec(),
    };
    calls::store_in_tx(&mut tx, &call_key(once), &stored)
        .await
        .map_err(store_failed)?;
    tx.commit().await.map_err(store_failed)?;
    Ok(Response::new(answer))
}

fn call_key(once: &Once) -> CallKey {
    CallKey {
        call: once.call,
        subject: once.subject.clone(),
        key: once.key.clone(),
    }
}

fn store_failed(error: events::Error) -> Status {
    internal(&error)
}
