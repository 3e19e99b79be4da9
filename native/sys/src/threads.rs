//! Threads whose start can fail without the end of the process.
//!
//! A thread of the standard library makes itself a stack for signals once it runs, and panics when it cannot
//! (library/std/src/sys/pal/unix/stack_overflow.rs). `pthread_create` gets all it needs before there is a thread.

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;

type Work = Box<dyn FnOnce() + Send>;

/// Runs `work` beside us on a stack of `stack_bytes` (at least 16 KiB). Nobody waits for its end.
///
/// Fails with `EAGAIN` when there is no memory or no room for a thread. `work` must not panic: there is nobody above it.
pub fn spawn(stack_bytes: usize, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let work: *mut Work = Box::into_raw(Box::new(Box::new(work)));
    let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: the attributes are used between their init and their destroy. `work` goes to the new thread, or, when
    // there is none, back to us.
    unsafe {
        let mut code = libc::pthread_attr_init(attributes.as_mut_ptr());
        if code == 0 {
            let attributes = attributes.as_mut_ptr();
            code = libc::pthread_attr_setstacksize(attributes, stack_bytes);
            if code == 0 {
                code = libc::pthread_attr_setdetachstate(attributes, libc::PTHREAD_CREATE_DETACHED);
            }
            if code == 0 {
                code = libc::pthread_create(thread.as_mut_ptr(), attributes, begin, work.cast());
            }
            libc::pthread_attr_destroy(attributes);
        }
        if code != 0 {
            drop(Box::from_raw(work));
            return Err(io::Error::from_raw_os_error(code));
        }
    }
    Ok(())
}

extern "C" fn begin(work: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` made it for this thread alone.
    let work: Box<Work> = unsafe { Box::from_raw(work.cast()) };
    work();
    std::ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn what_is_spawned_runs_beside_us() {
        let (sender, receiver) = channel();

        spawn(64 << 10, move || {
            let _ = sender.send(std::thread::current().id());
        })
        .unwrap();

        assert_ne!(receiver.recv().unwrap(), std::thread::current().id());
    }

    #[test]
    fn a_stack_that_is_too_small_is_an_error() {
        let error = spawn(1, || {}).unwrap_err();

        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }
}
