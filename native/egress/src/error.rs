//! What can go wrong, as far as somebody decides by it.

pub use dsec_protocol::failing::{Doing, Error, Result};
