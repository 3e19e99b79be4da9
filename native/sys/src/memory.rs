//! The allocator of a program that is on a node thousands of times.

/// Large buffers are mapped and given back when freed, for good: glibc otherwise raises the threshold as it goes.
pub fn keep_heap_small() {
    // SAFETY: mallopt only sets numbers; called before other threads exist.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 * 1024);
    }
}
