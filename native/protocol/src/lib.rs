//! Frames and records between node and agent (docs/internals/protocol.md), and the form of messages between a node and its programs.

pub mod codec;
pub mod desk;
pub mod error;
pub mod exec;
pub mod failing;
pub mod files;
pub mod frames;
pub mod limits;
pub mod opening;
pub mod raw;
pub mod rest;
pub mod session;

pub const GENERATION_MIN: u32 = 1;
pub const GENERATION_MAX: u32 = 1;
