//! What a ready descriptor belongs to, packed into the 64 bits that epoll keeps.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    Listener,
    Bell,
    Signals,
    Inotify,
    /// A connection that has not shown its preamble.
    Pending(u32),
    Link,
    ExecOut(u32),
    ExecErr(u32),
    ExecIn(u32),
    SessionOut(u32),
    SessionErr(u32),
    SessionCommand(u32),
    SessionReport(u32),
    /// By stream.
    HelperData(u32),
    HelperReport(u32),
    Socket(u32),
    /// By number of its listener.
    Port(u32),
}

impl Token {
    pub fn pack(self) -> u64 {
        let (kind, owner) = match self {
            Self::Listener => (1, 0),
            Self::Signals => (2, 0),
            Self::Inotify => (3, 0),
            Self::Pending(owner) => (4, owner),
            Self::Link => (5, 0),
            Self::ExecOut(owner) => (6, owner),
            Self::ExecErr(owner) => (7, owner),
            Self::ExecIn(owner) => (8, owner),
            Self::SessionOut(owner) => (9, owner),
            Self::SessionErr(owner) => (10, owner),
            Self::SessionCommand(owner) => (11, owner),
            Self::SessionReport(owner) => (12, owner),
            Self::HelperData(owner) => (13, owner),
            Self::HelperReport(owner) => (14, owner),
            Self::Socket(owner) => (15, owner),
            Self::Bell => (16, 0),
            Self::Port(owner) => (17, owner),
        };
        (kind << 32) | u64::from(owner)
    }

    pub fn unpack(packed: u64) -> Option<Self> {
        let owner = packed as u32;
        Some(match packed >> 32 {
            1 => Self::Listener,
            2 => Self::Signals,
            3 => Self::Inotify,
            4 => Self::Pending(owner),
            5 => Self::Link,
            6 => Self::ExecOut(owner),
            7 => Self::ExecErr(owner),
            8 => Self::ExecIn(owner),
            9 => Self::SessionOut(owner),
            10 => Self::SessionErr(owner),
            11 => Self::SessionCommand(owner),
            12 => Self::SessionReport(owner),
            13 => Self::HelperData(owner),
            14 => Self::HelperReport(owner),
            15 => Self::Socket(owner),
            16 => Self::Bell,
            17 => Self::Port(owner),
            _ => return None,
        })
    }
}
