//! Streams of the connection: what each one does.

use dsec_protocol::limits::CREDIT_INITIAL_BYTES;

use crate::connect::Connection;
use crate::files::helper::Helper;
use crate::files::read::Reading;
use crate::files::write::Writing;

/// Consumed bytes are granted again in lumps of this, not one frame for each.
const GRANT_BYTES: u64 = 64 << 10;

pub struct Stream {
    /// Payload bytes that we may still send.
    pub credit: u64,
    /// Payload bytes that the host may still send.
    pub window: u64,
    /// Consumed and not granted again yet.
    owed: u64,
    pub body: Body,
}

pub enum Body {
    /// By the exec's key.
    Exec(u32),
    Read(Reading),
    Write(Writing),
    Helper(Helper),
    Watch,
    /// Waits for a connection to a port, and becomes one then.
    Accept,
    Connect(Connection),
}

impl Stream {
    pub fn new(body: Body) -> Self {
        Self {
            credit: CREDIT_INITIAL_BYTES,
            window: CREDIT_INITIAL_BYTES,
            owed: 0,
            body,
        }
    }

    /// What to grant so that the host may send `window` bytes at once.
    pub fn widen(&mut self, window: u64) -> u64 {
        let more = window.saturating_sub(self.window);
        self.window += more;
        more
    }

    /// What to grant now that `bytes` more are consumed.
    pub fn consumed(&mut self, bytes: u64) -> Option<u64> {
        self.owed += bytes;
        if self.owed < GRANT_BYTES {
            return None;
        }
        let grant = std::mem::take(&mut self.owed);
        self.window += grant;
        Some(grant)
    }
}
