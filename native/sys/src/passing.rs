//! A pair of stream sockets, and descriptors on their way from one to the other (unix(7), SCM_RIGHTS).

use std::io;
use std::mem::{size_of, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::result::check;

const DESCRIPTORS_MAX: usize = 8;

pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    pair_of(libc::SOCK_STREAM)
}

/// A pair that keeps message borders.
pub fn message_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    pair_of(libc::SOCK_SEQPACKET)
}

fn pair_of(kind: i32) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` holds two descriptors; on success both are new and ours.
    unsafe {
        check(libc::socketpair(
            libc::AF_UNIX,
            kind | libc::SOCK_CLOEXEC,
            0,
            fds.as_mut_ptr(),
        ))?;
        Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

/// Sends some of `bytes` (at least one), and copies of all `descriptors` (at most 8) with the first of them.
pub fn send_with(
    socket: &impl AsRawFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd],
) -> io::Result<usize> {
    let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    if raw.len() > DESCRIPTORS_MAX {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    // Aligned as a header must be.
    let mut room = [MaybeUninit::<libc::cmsghdr>::uninit(); 8];
    let length = (raw.len() * size_of::<RawFd>()) as u32;
    // SAFETY: a zeroed msghdr is an empty one. Bytes and room outlive the call; the room is larger than CMSG_SPACE of
    // DESCRIPTORS_MAX descriptors, so the first header and its data lie in it.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !raw.is_empty() {
            message.msg_control = room.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(length) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(length) as usize;
            std::ptr::copy_nonoverlapping(
                raw.as_ptr().cast::<u8>(),
                libc::CMSG_DATA(header),
                length as usize,
            );
        }
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Some bytes, and the first descriptor that comes with them. Waits for them.
pub fn receive_with(
    socket: &impl AsRawFd,
    bytes: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let (count, found) = receive_all(socket, bytes)?;
    Ok((count, found.into_iter().next()))
}

/// Some bytes, and the descriptors that come with them, as far as there is room for them in this process. Waits for them.
pub fn receive_all(socket: &impl AsRawFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut room = [MaybeUninit::<libc::cmsghdr>::zeroed(); 8];
    // SAFETY: a zeroed msghdr is an empty one. Bytes and room outlive the call, and their lengths are given. The kernel has written
    // headers that lie in the room; each descriptor in them is new and ours.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = room.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&room);
        let count = libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        let mut found = Vec::new();
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let head = *header;
            if head.cmsg_level == libc::SOL_SOCKET && head.cmsg_type == libc::SCM_RIGHTS {
                let length = head.cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for number in 0..length / size_of::<RawFd>() {
                    found.push(OwnedFd::from_raw_fd(std::ptr::read_unaligned(
                        data.add(number),
                    )));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
        Ok((count, found))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;
    use crate::pipes::new_pipe;

    #[test]
    fn a_descriptor_arrives_with_its_bytes() {
        let (ours, theirs) = socket_pair().unwrap();
        let pipe = new_pipe().unwrap();

        let sent = send_with(&ours, b"text", &[pipe.write.as_fd()]).unwrap();
        let mut bytes = [0; 16];
        let (count, found) = receive_with(&theirs, &mut bytes).unwrap();
        File::from(found.unwrap()).write_all(b"through").unwrap();
        drop(pipe.write);

        assert_eq!((sent, &bytes[..count]), (4, &b"text"[..]));
        let mut text = String::new();
        File::from(pipe.read).read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
    }
}
