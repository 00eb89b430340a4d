//! Login options of a session.

use wire::{LOGIN_CANCEL_ON_DISCONNECT, LOGIN_FROM_NOW, Login, Text};

use crate::Error;

/// Options of one session's login.
#[derive(Clone, Debug)]
pub struct LoginOptions {
    /// Bearer credential, as on the RPC ports.
    pub token: String,
    /// Names the session across connections.
    pub session_name: String,
    /// Cancel the session's open orders if it is not back within the grace period after a loss.
    pub cancel_on_disconnect: bool,
    /// Skip messages numbered before the first login. A resume skips none. Ignored if
    /// `last_sequence` is not 0.
    pub from_now: bool,
    /// Last number received by an earlier run of this client.
    pub last_sequence: u64,
    /// Heartbeat interval in milliseconds: longest silence before the server ends the connection.
    /// 0 = the server's default.
    pub heartbeat_ms: u32,
    /// Self-trade prevention group; 0 = the user's own.
    pub stp_group: u32,
    /// Undrawn amount of the CFA-RUB trading hold to set, in kopecks; 0 = unchanged.
    pub money_hold_minor: i64,
}

impl LoginOptions {
    pub fn new(token: &str, session_name: &str) -> Self {
        Self {
            token: token.to_owned(),
            session_name: session_name.to_owned(),
            cancel_on_disconnect: false,
            from_now: false,
            last_sequence: 0,
            heartbeat_ms: 0,
            stp_group: 0,
            money_hold_minor: 0,
        }
    }

    /// The login message, which resumes after `last_sequence`.
    ///
    /// # Errors
    /// [`Error::LoginField`].
    pub(crate) fn message(&self, last_sequence: u64) -> Result<Login, Error> {
        let mut flags = 0;
        if self.cancel_on_disconnect {
            flags |= LOGIN_CANCEL_ON_DISCONNECT;
        }
        if self.from_now && last_sequence == 0 {
            flags |= LOGIN_FROM_NOW;
        }
        Ok(Login {
            token: Text::new(&self.token).ok_or(Error::LoginField)?,
            session_name: Text::new(&self.session_name)
                .filter(|_| !self.session_name.is_empty())
                .ok_or(Error::LoginField)?,
            last_sequence,
            flags,
            heartbeat_ms: self.heartbeat_ms,
            stp_group: self.stp_group,
            money_hold_minor: self.money_hold_minor,
        })
    }
}
