//! The allocator of a program that is on a node thousands of times.

/// Large buffers are mapped and given back when freed, for good: glibc otherwise raises the threshold as it goes. The heap
/// grows by little: from a large reserve zeroed buffers would be taken and written to, page by page, though nobody uses them.
pub fn keep_heap_small() {
    // SAFETY: mallopt only sets numbers, malloc_trim gives back what is free; called before other threads exist.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 * 1024);
        libc::mallopt(libc::M_TOP_PAD, 8 * 1024);
        // What start-up has taken already is such a reserve.
        libc::malloc_trim(0);
    }
}
