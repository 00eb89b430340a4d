//! The context of the proof's request, until the proof is a crate of its own.

/// A context whose key is the step's own name, so that a repeat is the same call.
pub fn context(key: &str) -> proto::common::v1::RequestContext {
    rpc::Context::new(crate::request::SOURCE)
        .child(crate::request::SOURCE, key)
        .to_proto()
}
