//! A member of a consumer group.

use std::{
    future::Future,
    pin::pin,
    sync::{atomic::Ordering, mpsc},
    task::{self, Poll, Waker},
    thread,
    time::Duration,
};

use async_trait::async_trait;
use rdkafka::{
    consumer::{Consumer, StreamConsumer},
    error::{KafkaError, RDKafkaErrorCode},
};

use super::{Context, record};
use crate::{Delivery, Error, Position, log::Source};

/// Longest wait for a member to commit its positions and leave its group. Without this limit
/// librdkafka waits for an unavailable coordinator until the session timeout.
const LEAVE_MAX: Duration = Duration::from_secs(2);

pub(super) struct Member {
    /// `None` only while it is dropped.
    consumer: Option<StreamConsumer<Context>>,
    context: Context,
    /// Error found by [`Source::try_next`], returned by the next call.
    failed: Option<KafkaError>,
}

impl Member {
    pub fn new(consumer: StreamConsumer<Context>, context: Context) -> Self {
        Self {
            consumer: Some(consumer),
            context,
            failed: None,
        }
    }

    fn consumer(&self) -> &StreamConsumer<Context> {
        self.consumer.as_ref().expect("not dropped")
    }
}

#[async_trait]
impl Source for Member {
    async fn next(&mut self) -> Result<Delivery, Error> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        loop {
            match self.consumer().recv().await {
                Ok(message) => return Ok(record::delivery(&message)),
                Err(error) if is_retried_by_consumer(&error) => log_retry(&error),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn try_next(&mut self) -> Option<Delivery> {
        loop {
            let polled = {
                let recv = pin!(self.consumer().recv());
                let polled = recv.poll(&mut task::Context::from_waker(Waker::noop()));
                polled.map_ok(|message| record::delivery(&message))
            };
            match polled {
                Poll::Ready(Ok(delivery)) => return Some(delivery),
                Poll::Ready(Err(error)) if is_retried_by_consumer(&error) => log_retry(&error),
                Poll::Ready(Err(error)) => {
                    self.failed = Some(error);
                    return None;
                }
                Poll::Pending => return None,
            }
        }
    }

    fn is_assigned(&self, position: &Position) -> bool {
        let assigned = self.consumer().assignment();
        !self.consumer().assignment_lost()
            && assigned.is_ok_and(|partitions| {
                partitions
                    .find_partition(&position.topic, position.partition)
                    .is_some()
            })
    }

    async fn commit(&mut self, position: &Position) -> Result<(), Error> {
        let stored =
            self.consumer()
                .store_offset(&position.topic, position.partition, position.offset);
        match stored {
            // The partition was reassigned; its new member gets the record again.
            Err(KafkaError::StoreOffset(RDKafkaErrorCode::State)) => Ok(()),
            stored => Ok(stored?),
        }
    }
}

impl Drop for Member {
    /// Leaves the group in a thread that may outlive this call.
    fn drop(&mut self) {
        let consumer = self.consumer.take();
        let (left_tx, left_rx) = mpsc::sync_channel(1);
        // If the thread cannot start, the closure and its consumer are dropped here.
        let _ = thread::Builder::new().spawn(move || {
            drop(consumer);
            let _ = left_tx.send(());
        });
        let slow = &self.context.leaves_slowly;
        if self.context.failing.borrow().is_some() || slow.load(Ordering::Relaxed) {
            return;
        }
        if left_rx.recv_timeout(LEAVE_MAX).is_err() {
            slow.store(true, Ordering::Relaxed);
            tracing::warn!("cannot leave the group in time; its last records may be redelivered");
        }
    }
}

/// Whether the consumer continues by itself after this error. An unavailable broker puts such an
/// error into the queue at each attempt to connect. A caller that paused after each of them would
/// read records only minutes after the broker is back.
fn is_retried_by_consumer(error: &KafkaError) -> bool {
    matches!(error, KafkaError::MessageConsumption(_))
}

fn log_retry(error: &KafkaError) {
    tracing::warn!(%error, "cannot read the event log; the consumer retries");
}
