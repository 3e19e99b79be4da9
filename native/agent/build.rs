//! The agent is linked to a fixed address. A program that can lie anywhere writes its own tables of addresses at the start: 32
//! KiB that are in memory once for each agent instead of once for all. Stack, heap and kernel pages lie anywhere still.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in ["-static", "-no-pie"] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
}
