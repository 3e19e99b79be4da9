//! System call filters: from words to the instructions that the kernel runs.
//!
//! One program with three answers instead of one stacked filter for each: an exec loads one instead of three, and the kernel's
//! check at load time, which runs the program once for every system call number, is quadratic in a linear list but not in a tree.

mod code;
mod compile;
mod table;
mod tree;

pub use compile::compile;
