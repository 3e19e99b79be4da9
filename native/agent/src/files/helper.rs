//! Long file operations in a forked child, so that the loop never waits for a disk: archive, extract, large lists,
//! removal of trees.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use dsec_protocol::codec::{decode, encode};
use dsec_protocol::files::{ExtractArgs, PathArgs, Written};
use dsec_protocol::frames::{Data, FrameType, CHANNEL_IN, CHANNEL_OUT};
use dsec_protocol::opening::Empty;
use dsec_sys::epoll::{Source, READ, WRITE};
use dsec_sys::errno::errno_of;
use dsec_sys::pipes::{new_pipe, set_nonblocking};
use dsec_sys::process::{fork_helper, kill};
use dsec_sys::rights::{become_for_good, CAPS_OF_FILES};
use dsec_sys::signals::KILL;
use serde::{Deserialize, Serialize};

use super::{extract, facts, path_of, stat_of, tar};
use crate::agent::Agent;
use crate::dispatch::Answer;
use crate::exec::requests::Pumped;
use crate::refusal::Refusal;
use crate::streams::{Body, Stream};
use crate::token::Token;
use crate::users::Account;

const REPORT_BYTES_MAX: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    Archive,
    Extract,
    List,
    Remove,
}

pub struct Helper {
    job: Job,
    path: Vec<u8>,
    /// 0 once it is reaped.
    pid: i32,
    /// Tar bytes: from the child for an archive, to it for an extraction. Of a list its answer.
    data: Option<Source>,
    waiting: VecDeque<u8>,
    offset: u64,
    input_ended: bool,
    report: Source,
    reported: Vec<u8>,
    outcome: Option<Report>,
}

/// The child's last words.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Report {
    written: Written,
    errno: Option<i32>,
    what: String,
}

/// What went wrong with which entry.
#[derive(Debug)]
pub struct EntryError {
    pub entry: String,
    pub error: io::Error,
}

impl EntryError {
    pub fn at(entry: &[u8]) -> impl FnOnce(io::Error) -> Self + '_ {
        move |error| Self {
            entry: String::from_utf8_lossy(&entry[..entry.len().min(256)]).into_owned(),
            error,
        }
    }
}

impl From<io::Error> for EntryError {
    fn from(error: io::Error) -> Self {
        Self {
            entry: String::new(),
            error,
        }
    }
}

impl Agent {
    pub fn op_archive(&mut self, stream: u32, args: &[u8]) -> Result<Answer, Refusal> {
        let args: PathArgs = decode(args)?;
        let account = self.account(args.user.as_deref())?;
        let target = path_of(&args.path)?;
        let follow = args.follow;
        let stat = self.on_path_as(&args.path, &account, |path| {
            Ok(stat_of(path, &facts(path, follow)?))
        })?;
        self.start_helper(
            stream,
            Job::Archive,
            &args.path,
            &account,
            None,
            move |data| tar::write_archive(&target, follow, data),
        )?;
        self.send(FrameType::Res, stream, &stat);
        Ok(Answer::Opened)
    }

    pub fn op_extract(&mut self, stream: u32, args: &[u8]) -> Result<Answer, Refusal> {
        let args: ExtractArgs = decode(args)?;
        let account = self.account(args.user.as_deref())?;
        let target = path_of(&args.path)?;
        let keep_owners = args.user.is_none() && account.uid == 0;
        self.start_helper(
            stream,
            Job::Extract,
            &args.path,
            &account,
            None,
            move |data| extract::extract_archive(&target, keep_owners, data),
        )?;
        self.send(FrameType::Res, stream, &Empty {});
        Ok(Answer::Opened)
    }

    pub fn remove_tree(
        &mut self,
        stream: u32,
        path: &[u8],
        account: &Account,
    ) -> Result<Answer, Refusal> {
        let target = path_of(path)?;
        self.start_helper(stream, Job::Remove, path, account, None, move |_| {
            remove_all(&target)
        })?;
        Ok(Answer::Opened)
    }

    /// `also`: a descriptor that the child keeps besides its pipes.
    pub fn start_helper(
        &mut self,
        stream: u32,
        job: Job,
        path: &[u8],
        account: &Account,
        also: Option<RawFd>,
        work: impl FnOnce(File) -> Result<Written, EntryError>,
    ) -> Result<(), Refusal> {
        let failed = |e: io::Error| Refusal::system("spawn_failed", "helper", &e);
        let data = new_pipe().map_err(failed)?;
        let report = new_pipe().map_err(failed)?;
        set_nonblocking(&report.read).map_err(failed)?;
        let (ours, theirs) = match job {
            Job::Extract => (data.write, data.read),
            Job::Archive | Job::List | Job::Remove => (data.read, data.write),
        };
        set_nonblocking(&ours).map_err(failed)?;
        let mut keep = vec![theirs.as_raw_fd(), report.write.as_raw_fd()];
        keep.extend(also);
        let switch = self.own.may_switch();
        let pid = fork_helper(&keep, || {
            let done = work_as(account, switch, theirs, work);
            i32::from(write_report(report.write, done).is_err())
        })
        .map_err(failed)?;
        let mut ours = Source::new(&self.poller, ours, Token::HelperData(stream).pack());
        let mut report = Source::new(
            &self.poller,
            report.read,
            Token::HelperReport(stream).pack(),
        );
        if matches!(job, Job::Archive | Job::List) {
            ours.want(READ).map_err(failed)?;
        }
        report.want(READ).map_err(failed)?;
        let helper = Helper {
            job,
            path: path.to_vec(),
            pid,
            data: (job != Job::Remove).then_some(ours),
            waiting: VecDeque::new(),
            offset: 0,
            input_ended: false,
            report,
            reported: Vec::new(),
            outcome: None,
        };
        self.streams
            .insert(stream, Stream::new(Body::Helper(helper)));
        Ok(())
    }

    pub fn helper_data_ready(&mut self, id: u32) {
        let scratch = &mut self.scratch;
        let Some(Body::Helper(helper)) = self.streams.get_mut(&id).map(|s| &mut s.body) else {
            return;
        };
        let mut consumed = 0;
        match helper.job {
            Job::Archive => helper.take_archive(scratch),
            Job::Extract => consumed = helper.give_archive(),
            Job::List => helper.take_list(scratch),
            Job::Remove => {}
        }
        self.grant(id, consumed);
        self.ready.insert(id);
    }

    pub fn helper_report_ready(&mut self, id: u32) {
        let Some(Body::Helper(helper)) = self.streams.get_mut(&id).map(|s| &mut s.body) else {
            return;
        };
        let mut buffer = [0u8; 1024];
        match helper.report.read(&mut buffer) {
            Ok(None) => {}
            Ok(Some(count)) if count > 0 && helper.reported.len() < REPORT_BYTES_MAX => {
                helper.reported.extend_from_slice(&buffer[..count]);
            }
            _ => {
                // Closed: what is there is all, and nothing means that it died.
                helper.outcome = Some(decode(&helper.reported).unwrap_or_else(|_| Report {
                    errno: Some(libc::EIO),
                    what: "the helper died".to_owned(),
                    ..Report::default()
                }));
                // Waited for no more; a poller that fails here shows again at the stream's end.
                let _ = helper.report.want(0);
            }
        }
        self.ready.insert(id);
    }

    pub fn helper_reaped(&mut self, pid: i32) {
        for stream in self.streams.values_mut() {
            if let Body::Helper(helper) = &mut stream.body {
                if helper.pid == pid {
                    helper.pid = 0;
                }
            }
        }
    }

    pub fn helper_input(
        &mut self,
        id: u32,
        mut stream: Stream,
        data: &Data<'_>,
    ) -> Result<(), Refusal> {
        let Body::Helper(helper) = &mut stream.body else {
            return Ok(());
        };
        let expected = helper.job == Job::Extract && !helper.input_ended;
        if !expected || data.channel != CHANNEL_IN || data.offset != helper.offset {
            self.abandon(id, stream);
            return Err(Refusal::invalid("data out of order"));
        }
        helper.offset += data.payload.len() as u64;
        helper.waiting.extend(data.payload);
        let consumed = helper.give_archive();
        self.streams.insert(id, stream);
        self.grant(id, consumed);
        Ok(())
    }

    pub fn helper_input_end(&mut self, id: u32, mut stream: Stream) {
        if let Body::Helper(helper) = &mut stream.body {
            helper.input_ended = true;
            if helper.job == Job::Extract {
                helper.give_archive();
            }
        }
        self.streams.insert(id, stream);
    }

    pub fn pump_helper(&mut self, id: u32, stream: &mut Stream) -> Pumped {
        let (Body::Helper(helper), Some(link)) = (&mut stream.body, self.link.as_deref_mut())
        else {
            return Pumped::Idle;
        };
        if helper.job == Job::Archive && !helper.waiting.is_empty() {
            let (head, _) = helper.waiting.as_slices();
            let count = head.len().min(stream.credit as usize);
            if count == 0 {
                return Pumped::Idle;
            }
            let data = Data {
                channel: CHANNEL_OUT,
                offset: helper.offset,
                sequence: 0,
                payload: &head[..count],
            };
            if link.send_data(id, data, &[]).is_err() {
                return Pumped::Idle;
            }
            helper.waiting.drain(..count);
            helper.offset += count as u64;
            stream.credit -= count as u64;
        }
        if helper.waiting.is_empty() && helper.job == Job::Archive {
            helper.waiting = VecDeque::new();
            if let Some(data) = &mut helper.data {
                if data.want(READ).is_err() {
                    helper.data = None;
                }
            }
        }
        let sent = match helper.job {
            Job::Archive => helper.waiting.is_empty() && helper.data.is_none(),
            Job::List => helper.data.is_none(),
            Job::Extract | Job::Remove => true,
        };
        match (&helper.outcome, sent) {
            (Some(outcome), true) => {
                answer(link, id, helper, outcome);
                Pumped::Over
            }
            _ if helper.waiting.is_empty() || helper.job != Job::Archive => Pumped::Idle,
            _ => Pumped::More,
        }
    }
}

impl Helper {
    /// The stream is given up: the child stops where it is.
    pub fn abandon(self) {
        if self.pid > 0 {
            let _ = kill(self.pid, KILL);
        }
    }

    fn take_archive(&mut self, scratch: &mut [u8]) {
        let Some(source) = &mut self.data else {
            return;
        };
        if !self.waiting.is_empty() {
            // One buffer full is enough ahead of the connection; `pump` asks for more.
            if source.want(0).is_err() {
                self.data = None;
            }
            return;
        }
        match source.read(scratch) {
            Ok(None) => {}
            Ok(Some(count)) if count > 0 => self.waiting.extend(&scratch[..count]),
            _ => self.data = None,
        }
    }

    /// An answer is at most a frame, and is kept until it is whole.
    fn take_list(&mut self, scratch: &mut [u8]) {
        match self.data.as_ref().map(|source| source.read(scratch)) {
            Some(Ok(None)) => {}
            Some(Ok(Some(count))) if count > 0 => self.waiting.extend(&scratch[..count]),
            _ => self.data = None,
        }
    }

    /// Writes what the child takes; closes the pipe at the end. Gives the bytes that are off our hands.
    fn give_archive(&mut self) -> u64 {
        let mut gone = 0;
        while let (Some(source), false) = (&self.data, self.waiting.is_empty()) {
            match source.write(self.waiting.as_slices().0) {
                Ok(Some(count)) => {
                    self.waiting.drain(..count);
                    gone += count as u64;
                }
                Ok(None) => break,
                // It has ended early; its report says why.
                Err(_) => self.data = None,
            }
        }
        if self.data.is_none() {
            gone += self.waiting.len() as u64;
            self.waiting.clear();
        }
        if self.waiting.is_empty() && self.input_ended {
            self.data = None;
        }
        let interest = match self.waiting.is_empty() {
            true => 0,
            false => WRITE,
        };
        if let Some(source) = &mut self.data {
            if source.want(interest).is_err() {
                self.data = None;
            }
        }
        gone
    }
}

fn answer(link: &mut crate::link::Link, id: u32, helper: &Helper, outcome: &Report) {
    match (outcome.errno, helper.job) {
        (Some(errno), _) => {
            let error = io::Error::from_raw_os_error(errno);
            let mut what = helper.path.clone();
            if !outcome.what.is_empty() {
                what.extend_from_slice(b": ");
                what.extend_from_slice(outcome.what.as_bytes());
            }
            link.refuse(id, Refusal::file(&what, &error));
        }
        (None, Job::Archive) => link.end(id),
        (None, Job::Extract) => link.send(FrameType::End, id, &outcome.written),
        (None, Job::List) => {
            let body: Vec<u8> = helper.waiting.iter().copied().collect();
            if link.send_body(FrameType::Res, id, &body).is_err() {
                link.refuse(id, Refusal::new("internal", "the answer is too long"));
            }
        }
        (None, Job::Remove) => link.send(FrameType::Res, id, &Empty {}),
    }
}

/// In the child: becomes the user for good, then works.
fn work_as(
    account: &Account,
    switch: bool,
    data: OwnedFd,
    work: impl FnOnce(File) -> Result<Written, EntryError>,
) -> Result<Written, EntryError> {
    if switch {
        let keep = match account.uid {
            0 => CAPS_OF_FILES,
            _ => 0,
        };
        become_for_good(account.uid, account.gid, &account.groups, keep)?;
    }
    work(File::from(data))
}

fn write_report(fd: OwnedFd, done: Result<Written, EntryError>) -> io::Result<()> {
    let report = match done {
        Ok(written) => Report {
            written,
            ..Report::default()
        },
        Err(failed) => Report {
            errno: Some(errno_of(&failed.error)),
            what: failed.entry,
            ..Report::default()
        },
    };
    let body = encode(&report).map_err(io::Error::other)?;
    File::from(fd).write_all(&body)
}

fn remove_all(path: &Path) -> Result<Written, EntryError> {
    std::fs::remove_dir_all(path)?;
    Ok(Written::default())
}
