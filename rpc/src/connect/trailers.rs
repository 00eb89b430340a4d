//! Trailers of a Connect stream that are known only at its end.
//!
//! connectrpc takes a stream's trailers before its first message; gRPC sends them after the last.
//! So the bridge stores them in [`LateTrailers`], and [`WithLate`] inserts them into the
//! end-of-stream message. Only that message is changed, and it is never compressed.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use serde_json::Value;

use super::codec::{self, PREFIX_BYTES};

/// Flag of Connect's end-of-stream message.
const END_STREAM: u8 = 0b10;

/// Storage for late trailers, shared through the request's extensions.
#[derive(Clone, Default)]
pub(super) struct LateTrailers(Arc<Mutex<HeaderMap>>);

impl LateTrailers {
    pub(super) fn put(&self, trailers: HeaderMap) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = trailers;
    }

    fn take(&self) -> HeaderMap {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(super) struct WithLate {
    body: Body,
    late: LateTrailers,
}

impl WithLate {
    pub(super) fn new(body: Body, late: LateTrailers) -> Self {
        WithLate { body, late }
    }
}

impl http_body::Body for WithLate {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        // The bridge stores trailers after the last message. The next data is the end-of-stream
        // message, or messages batched before it. `connectrpc` always sends the end-of-stream
        // message as a frame of its own.
        let Poll::Ready(Some(Ok(frame))) = polled else {
            return polled;
        };
        let rewritten = match frame.data_ref() {
            Some(data) if is_end_stream(data) => rewrite(data, &self.late),
            _ => None,
        };
        Poll::Ready(Some(Ok(rewritten.map_or(frame, Frame::data))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // An end-of-stream message may grow; a body of known length is unary and unchanged.
        self.body.size_hint()
    }
}

/// True if `data` is exactly one uncompressed end-of-stream message.
fn is_end_stream(data: &Bytes) -> bool {
    data.split_first_chunk::<PREFIX_BYTES>()
        .is_some_and(|([flags, length @ ..], rest)| {
            *flags == END_STREAM && u32::from_be_bytes(*length) as usize == rest.len()
        })
}

fn rewrite(data: &Bytes, late: &LateTrailers) -> Option<Bytes> {
    let trailers = late.take();
    if trailers.is_empty() {
        return None;
    }
    let mut end: Value = serde_json::from_slice(&data[PREFIX_BYTES..]).ok()?;
    let metadata = end
        .as_object_mut()?
        .entry("metadata")
        .or_insert_with(|| Value::Object(serde_json::Map::new()))
        .as_object_mut()?;
    for name in trailers.keys() {
        let values = trailers.get_all(name).iter();
        let values: Vec<_> = values.filter_map(|value| value.to_str().ok()).collect();
        metadata.insert(name.to_string(), values.into());
    }
    let mut framed = BytesMut::from(&codec::frame(end.to_string().as_bytes())[..]);
    framed[0] = END_STREAM;
    Some(framed.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_trailers_join_the_end_of_stream_message_only() {
        let mut end = BytesMut::from(&codec::frame(br#"{"metadata":{"a":["1"]}}"#)[..]);
        end[0] = END_STREAM;
        let end = end.freeze();
        assert!(is_end_stream(&end));
        assert!(!is_end_stream(&codec::frame(b"x")));
        let late = LateTrailers::default();
        assert_eq!(rewrite(&end, &late), None);
        let mut trailers = HeaderMap::new();
        trailers.append("b", "2".parse().unwrap());
        trailers.append("b", "3".parse().unwrap());
        late.put(trailers);
        let out = rewrite(&end, &late).unwrap();
        assert!(is_end_stream(&out));
        let json: Value = serde_json::from_slice(&out[PREFIX_BYTES..]).unwrap();
        assert_eq!(
            json["metadata"],
            serde_json::json!({"a": ["1"], "b": ["2", "3"]})
        );
    }
}
