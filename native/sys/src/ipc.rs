//! System V IPC objects (sysvipc(7)): removed by whoever made them.

use std::io;

use crate::result::check;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    SharedMemory,
    Semaphores,
    Queue,
}

/// As ipcrm(1): EPERM unless it is ours.
pub fn remove_object(object: Object, id: i32) -> io::Result<()> {
    // SAFETY: IPC_RMID takes no pointer.
    check(unsafe {
        match object {
            Object::SharedMemory => libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()),
            Object::Semaphores => libc::semctl(id, 0, libc::IPC_RMID),
            Object::Queue => libc::msgctl(id, libc::IPC_RMID, std::ptr::null_mut()),
        }
    })
    .map(drop)
}
