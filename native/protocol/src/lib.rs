//! Frames and records between node and agent (docs/internals/protocol.md).
