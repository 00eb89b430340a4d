//! The approval that a service's call executes, in the metadata of the call (D32).
//!
//! The access layer makes it the subject of the caller, so logs, audit records and the scope of
//! idempotency keys name both persons and the approval. Ignored unless the caller is the approvals
//! service.

use http::{HeaderMap, HeaderValue};

use crate::Error;

const APPROVAL_ID: &str = "x-approval-id";
const REQUESTER: &str = "x-approval-requester";
const APPROVER: &str = "x-approval-approver";

/// Longest value, in bytes: that of an id.
const VALUE_BYTES_MAX: usize = proto::checks::ID_BYTES_MAX;

/// The persons of an approved call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Approved {
    pub approval_id: String,
    /// Person that requested the call.
    pub requester: String,
    /// Another person.
    pub approver: String,
}

impl Approved {
    /// The approval named in the metadata, if all its values are there and well formed.
    pub(crate) fn read(headers: &HeaderMap) -> Option<Self> {
        let value = |name: &str| {
            let text = headers.get(name)?.to_str().ok()?;
            let is_id = !text.is_empty() && text.len() <= VALUE_BYTES_MAX;
            is_id.then(|| text.to_owned())
        };
        Some(Approved {
            approval_id: value(APPROVAL_ID)?,
            requester: value(REQUESTER)?,
            approver: value(APPROVER)?,
        })
    }

    /// Adds the approval to the metadata of a call.
    ///
    /// # Errors
    /// [`Error::Credential`]: a name is not a header value.
    pub fn write(&self, headers: &mut HeaderMap) -> Result<(), Error> {
        for (name, text) in [
            (APPROVAL_ID, &self.approval_id),
            (REQUESTER, &self.requester),
            (APPROVER, &self.approver),
        ] {
            let value = HeaderValue::from_str(text).map_err(|_| Error::Credential)?;
            headers.insert(name, value);
        }
        Ok(())
    }

    /// The caller's subject in logs and audit records.
    pub fn subject(&self) -> String {
        format!(
            "{}, approved by {} (approval {})",
            self.requester, self.approver, self.approval_id
        )
    }
}
