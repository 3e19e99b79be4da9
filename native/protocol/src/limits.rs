//! Bounds that both sides share; `src/dsec/core/limits.py` gives their reasons.

pub const FRAME_BYTES_MAX: usize = 1 << 20;
pub const DATA_BYTES_MAX: usize = 256 << 10;
pub const CREDIT_INITIAL_BYTES: u64 = 256 << 10;
pub const STREAMS_MAX: usize = 4096;
pub const ARGV_ITEMS_MAX: usize = 65_536;
pub const ARGV_BYTES_MAX: usize = 512 << 10;
pub const ENV_ITEMS_MAX: usize = 8_192;
pub const EXEC_UNACKED_BYTES_MAX: usize = 1 << 20;
pub const EXECS_LIVE_MAX: usize = 512;
pub const EXECS_KEPT_MAX: usize = 1_024;
pub const EXEC_GRACE_S_MAX: f64 = 300.0;
pub const EXEC_TIMEOUT_S_MAX: f64 = 30.0 * 86_400.0;
pub const DRAIN_AFTER_EXIT_MS: u64 = 250;
pub const SESSIONS_MAX: usize = 64;
pub const PATH_BYTES_MAX: usize = 4_095;
pub const LIST_ENTRIES_MAX: usize = 1_000;
pub const LISTENERS_MAX: usize = 64;
pub const WATCHES_MAX: usize = 16;
pub const WATCH_DIRECTORIES_MAX: usize = 65_536;
pub const WATCH_EVENTS_QUEUED_MAX: usize = 16_384;
