//! Request body of an RPC with limits checked while it streams: message size and, for a unary
//! method, exactly one message.
//!
//! Both checks read only the five-byte prefixes, so a message that is too large is refused unread.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;

/// Body that fails for an oversized message once its length is known, and for any number of
/// messages but one if unary.
pub(crate) struct CheckedBody {
    body: Body,
    message_bytes_max: usize,
    single: bool,
    messages: usize,
    prefix: [u8; 5],
    prefix_len: usize,
    /// Remaining bytes of the current message.
    message_left: usize,
}

impl CheckedBody {
    pub(crate) fn new(body: Body, message_bytes_max: usize, single: bool) -> Self {
        CheckedBody {
            body,
            message_bytes_max,
            single,
            messages: 0,
            prefix: [0; 5],
            prefix_len: 0,
            message_left: 0,
        }
    }

    fn admit(&mut self, mut data: &[u8]) -> Result<(), Status> {
        while !data.is_empty() {
            if self.message_left > 0 {
                let taken = self.message_left.min(data.len());
                self.message_left -= taken;
                data = &data[taken..];
                continue;
            }
            self.prefix[self.prefix_len] = data[0];
            self.prefix_len += 1;
            data = &data[1..];
            if self.prefix_len == self.prefix.len() {
                self.prefix_len = 0;
                self.messages += 1;
                let [_, length @ ..] = self.prefix;
                self.message_left = u32::from_be_bytes(length) as usize;
                if self.message_left > self.message_bytes_max {
                    return Err(Status::resource_exhausted(format!(
                        "Message is larger than {} bytes",
                        self.message_bytes_max
                    )));
                }
                if self.single && self.messages > 1 {
                    return Err(not_one_message());
                }
            }
        }
        Ok(())
    }

    fn lacks_message(&self) -> bool {
        self.single && self.messages == 0 && self.prefix_len == 0
    }
}

fn not_one_message() -> Status {
    Status::unimplemented("Method takes exactly one request message")
}

impl http_body::Body for CheckedBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        let checked = match &polled {
            Poll::Ready(Some(Ok(frame))) => match frame.data_ref() {
                Some(data) => self.admit(data),
                None => Ok(()),
            },
            Poll::Ready(None) if self.lacks_message() => Err(not_one_message()),
            _ => Ok(()),
        };
        if let Err(status) = checked {
            // Reported once. The rest of the body is not read.
            self.single = false;
            return Poll::Ready(Some(Err(Box::new(status))));
        }
        polled.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && !self.lacks_message()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::MESSAGE_BYTES_MAX;

    #[test]
    fn message_limit_holds_at_the_bound_and_one_past_it_across_chunks() {
        let prefix = |len: usize| {
            let mut bytes = vec![0];
            bytes.extend((len as u32).to_be_bytes());
            bytes
        };
        let mut body = CheckedBody::new(Body::empty(), MESSAGE_BYTES_MAX, false);
        let whole = [prefix(MESSAGE_BYTES_MAX), vec![7; MESSAGE_BYTES_MAX]].concat();
        for chunk in whole.chunks(65_537) {
            assert!(body.admit(chunk).is_ok());
        }
        let next = prefix(MESSAGE_BYTES_MAX + 1);
        assert!(body.admit(&next[..3]).is_ok());
        let refused = body.admit(&next[3..]).unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
    }

    #[test]
    fn a_method_of_one_message_refuses_none_and_two() {
        let mut body = CheckedBody::new(Body::empty(), MESSAGE_BYTES_MAX, true);
        assert!(body.lacks_message() && !http_body::Body::is_end_stream(&body));
        assert!(body.admit(&[0, 0, 0, 0, 0]).is_ok());
        assert!(!body.lacks_message());
        assert!(body.admit(&[0, 0, 0, 0, 0]).is_err());
    }
}
