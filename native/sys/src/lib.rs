//! System calls that the standard library lacks, each wrapped once; the only crate with `unsafe`.
