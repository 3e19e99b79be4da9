//! A sandbox made ahead: all of it that does not depend on what is to run there (cgroups, namespaces, ids, `/dev`, `/proc`).
//! Its worker waits for the rest of the job, and takes everything back when nobody can ask for it any more.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::agent;
use crate::error::{Doing, Error, Result};
use crate::launch::{begin, catch_up, conclude, finish, roll_back, why, Begun};
use crate::steps::check::check;
use crate::steps::view::Cover;
use crate::steps::{Clock, Job, Step};
use crate::system::System;
use crate::undo::Undo;
use crate::view::Shown;
use crate::wire::{self, LaunchPlan, Launched, ViewKind};
use crate::workers::Report;

/// A request, and what is known of its layers and filter: far less than a socket takes at once.
pub const ORDER_BYTES_MAX: usize = 192 * 1024;

/// What is to become of a sandbox made ahead.
#[derive(Serialize, Deserialize)]
pub struct Order {
    /// The request with the plan, as it came.
    pub request: ByteBuf,
    /// Mount points of the layers, the lowest first, the skeleton before all.
    pub lowers: Vec<PathBuf>,
    /// The compiled filter of commands.
    pub filter_exec: ByteBuf,
    /// What is to cover the kernel's files: a path of the launcher's, and one inside.
    pub view: Vec<(PathBuf, CString)>,
    pub view_kind: ViewKind,
    pub fail_step: Option<String>,
}

impl Order {
    pub fn new(
        request: &[u8],
        lowers: Vec<PathBuf>,
        filter_exec: Vec<u8>,
        view: &Shown,
        fail_step: Option<String>,
    ) -> Order {
        let source = |source: &crate::view::Source| {
            (source.path.clone(), source.target.clone().into_owned())
        };
        Order {
            request: ByteBuf::from(request),
            lowers,
            filter_exec: ByteBuf::from(filter_exec),
            view: view.sources.iter().map(source).collect(),
            view_kind: view.kind,
            fail_step,
        }
    }

    /// None when it is longer than a message may be.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let bytes = wire::encode(self).ok()?;
        (bytes.len() <= ORDER_BYTES_MAX).then_some(bytes)
    }
}

/// An order that has arrived.
pub struct Ordered {
    order: Order,
    plan: LaunchPlan,
    pub covers: Vec<Cover>,
}

impl Ordered {
    /// By the new process, from the worker.
    pub fn take(system: &dyn System, from: BorrowedFd) -> Result<Ordered> {
        let (message, files) = system.take(from).doing("wait for", "the launcher")?;
        if message.is_empty() {
            return Err(Error::Vanished);
        }
        let count = files.len();
        let ordered = Ordered::read(&message, files)?;
        match count == ordered.order.view.len() {
            true => Ok(ordered),
            // Else what was lost on the way would show the machine instead.
            false => Err(Error::Invalid(format!("{count} files came with an order"))),
        }
    }

    fn read(message: &[u8], files: Vec<OwnedFd>) -> Result<Ordered> {
        let order: Order = rmp_serde::from_slice(message)
            .map_err(|error| Error::Invalid(format!("not an order: {error}")))?;
        let plan = wire::decode_args(&order.request)?;
        let targets = order.view.iter().map(|(_, target)| target.clone().into());
        let covers = files.into_iter().zip(targets);
        let covers = covers.map(|(mount, target)| Cover { mount, target });
        Ok(Ordered {
            covers: covers.collect(),
            order,
            plan,
        })
    }

    /// The whole job, of which `made` was the part that was done ahead.
    pub fn job<'a>(&'a self, made: &Job<'a>) -> Result<Job<'a>> {
        let source = |(path, target): &(PathBuf, CString)| crate::view::Source {
            path: path.clone(),
            target: target.clone().into(),
        };
        Ok(Job {
            plan: &self.plan,
            lowers: self.order.lowers.clone(),
            sysfs: made.sysfs.clone(),
            view: Shown {
                sources: self.order.view.iter().map(source).collect(),
                kind: self.order.view_kind,
                server: None,
            },
            config: agent::config(&self.plan, self.order.filter_exec.to_vec())?,
            fail_step: self.order.fail_step.clone(),
            ..*made
        })
    }
}

/// Whether what was made for one plan serves for another: what is done ahead is the same. Limits are written again.
pub fn serves(made: &LaunchPlan, wanted: &LaunchPlan) -> bool {
    let whole = |plan: &LaunchPlan| {
        !plan.light
            && plan.cgroup1_from.is_empty()
            && plan.upper_tmpfs_bytes.is_none()
            && plan.upper_device.is_none()
    };
    let limits = |plan: &LaunchPlan| -> Vec<String> {
        let first = plan.cgroup1_files.iter();
        let first =
            first.flat_map(|(of, files)| files.keys().map(move |name| format!("{of} {name}")));
        plan.cgroup2_files.keys().cloned().chain(first).collect()
    };
    whole(made)
        && whole(wanted)
        && made.sandbox == wanted.sandbox
        && made.id_base == wanted.id_base
        && made.directory == wanted.directory
        && made.socket == wanted.socket
        && made.cgroup2 == wanted.cgroup2
        && made.cgroup1 == wanted.cgroup1
        && limits(made) == limits(wanted)
        && made.sysctls.keys().eq(wanted.sysctls.keys())
        && made.masks == wanted.masks
        && made.readonly_proc == wanted.readonly_proc
        && made.shm_bytes == wanted.shm_bytes
        && made.filter_agent == wanted.filter_agent
}

/// Makes what can be made ahead for `job`, and launches what it is told to by `channel`. When that is closed nobody wants it, and
/// nothing is left.
pub fn prepare(system: &dyn System, job: &Job, channel: &OwnedFd) -> Report {
    let (mut clock, mut undo) = (Clock::start(job.fail_step.clone()), Undo::default());
    let made = begin(system, job, true, &mut clock, &mut undo);
    clock.end();
    let ordered = made.and_then(|(begun, _)| {
        let order = wait_for_order(system, channel, &begun)?;
        Ok((begun, order))
    });
    let began = Instant::now();
    let launched = match ordered {
        Ok((begun, Some(order))) => carry_out(system, job, &order, begun, &mut clock),
        Ok((_, None)) => return given_up(system, job, undo),
        Err(error) => Err(error),
    };
    conclude(system, job, launched, &clock, undo, began).into()
}

/// None when there will be none.
fn wait_for_order(
    system: &dyn System,
    channel: &OwnedFd,
    begun: &Begun,
) -> Result<Option<Vec<u8>>> {
    let (channel, report) = (channel.as_fd(), begun.child.report.as_fd());
    if !system
        .wait_either(channel, report)
        .doing("wait for", "an order")?
    {
        return Err(Error::Vanished); // the new process has ended, or says why it is about to
    }
    let (order, _) = system.take(channel).doing("take", "an order")?;
    Ok((!order.is_empty()).then_some(order))
}

fn given_up(system: &dyn System, job: &Job, mut undo: Undo) -> Report {
    let left = roll_back(system, job, &mut undo);
    let failure = Error::Invalid(format!("left behind: {}", left.join(", ")));
    Report {
        failure: (!left.is_empty()).then(|| failure.into_failure("prepare")),
        ..Report::default()
    }
}

/// What `made` was the beginning of, as the order has it.
fn carry_out(
    system: &dyn System,
    made: &Job,
    order: &[u8],
    mut begun: Begun,
    clock: &mut Clock,
) -> Result<Launched> {
    let ordered = Ordered::read(order, Vec::new())?;
    let job = &ordered.job(made)?;
    *clock = Clock::start(job.fail_step.clone());
    clock.begin(Step::Check)?;
    check(job.plan)?;
    let (covers, copies) = catch_up(system, job, made.plan, &begun, clock)?;
    let files: Vec<_> = covers.iter().map(|cover| cover.mount.as_fd()).collect();
    system.part_from(begun.child.pid, &job.processors);
    let told = system.pass(begun.child.go.as_fd(), order, &files);
    if let Err(error) = told.doing("tell", "the new process") {
        return Err(why(system, &mut begun.child, error)); // it may have ended just before
    }
    drop(covers);
    finish(system, job, clock, begun, copies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{null, plan, Fake, Parts};
    use crate::steps::inside::{become_agent, Inside};
    use crate::view::Source;

    /// A request as nodes send it, for a plan that differs from the one it was prepared with.
    fn request(change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) -> Vec<u8> {
        let mut args = plan_as_sent();
        change(&mut args);
        let request = serde_json::json!({"id": 1, "op": "launch", "args": args});
        rmp_serde::to_vec_named(&request).unwrap()
    }

    fn plan_as_sent() -> serde_json::Map<String, serde_json::Value> {
        let plan = plan();
        let text = serde_json::json!({
            "sandbox": plan.sandbox, "id_base": plan.id_base, "lowers": ["base"],
            "directory": plan.directory, "socket": plan.socket, "hostname": "mine",
            "masks": plan.masks, "readonly_proc": plan.readonly_proc, "shm_bytes": plan.shm_bytes,
            "cgroup2": plan.cgroup2, "cgroup2_files": {"pids.max": "99"}, "cgroup1": plan.cgroup1,
            "cgroup1_files": plan.cgroup1_files, "filter_agent": plan.filter_agent,
            "rlimits": {"nofile": [5, 6]}, "sysctls": {"kernel.shmmni": "1", "kernel.msgmni": "5"}, "caps_agent": 128, "named": "sbx_other",
        });
        match text {
            serde_json::Value::Object(map) => map,
            _ => unreachable!(),
        }
    }

    fn order(request: Vec<u8>, fail_step: Option<&str>) -> Vec<u8> {
        let view = Shown {
            sources: vec![Source {
                path: "/layers/.views/meminfo".into(),
                target: c"/proc/meminfo".into(),
            }],
            kind: ViewKind::Static,
            server: None,
        };
        let lowers = vec!["/layers/.skeleton/x".into(), "/layers/base".into()];
        let fail_step = fail_step.map(String::from);
        Order::new(&request, lowers, vec![1], &view, fail_step)
            .encode()
            .unwrap()
    }

    fn ordered(system: &Fake) -> Report {
        prepare(system, &Parts::plain().job(None), &null())
    }

    #[test]
    fn what_is_the_same_for_all_is_there_before_the_order_and_the_rest_after_it() {
        let system = Fake::with_order(order(request(|_| {}), None), None);

        let launched = ordered(&system).launched.unwrap();

        assert_eq!((launched.pid, launched.view), (4242, ViewKind::Static));
        let order = [
            "make_dir /cg2/s",
            "write_file /cg2/s/pids.max 10",
            "listen",
            "clone",
            "make_dir /state/s ",
            "write_file /proc/4242/uid_map",
            "write m",
            "attach_at \"/scratch\"",
            "make_proc",
            "bind \"/empty/directory\" \"kcore\"",
            "pass proc 1",
            "wait_either",
            "take",
            "write_file /cg2/s/pids.max 99",
            "clone_mount \"/layers/.views/meminfo\"",
            "clone_mount \"/layers/base\"",
            "part_from 4242",
            "pass order 1",
            "make_mount \"overlay\"",
            "write r",
        ];
        let places: Vec<usize> = order.iter().map(|call| system.place(call)).collect();
        assert!(
            places.windows(2).all(|pair| pair[0] < pair[1]),
            "{places:?} {:#?}",
            system.log.borrow()
        );
        let log = system.log.borrow();
        // A limit that is the same is not written again.
        let mems = log.iter().filter(|call| call.contains("cpuset.mems"));
        assert_eq!(mems.count(), 1);
        assert!(!system.things.borrow().is_empty());
    }

    #[test]
    fn the_new_process_takes_its_orders_as_they_come() {
        let parts = Parts::plain();
        let (job, file) = (parts.job(None), null());
        let mut system = Fake::talking(None);
        system.order = order(request(|_| {}), None);
        let inside = Inside {
            job: &job,
            ahead: true,
            written: None,
            go: &file,
            report: &file,
            socket: &file,
            cgroup: Some(&file),
            view: &[],
        };

        let mut clock = Clock::start(None);
        let error = become_agent(&system, &inside, &mut clock);

        assert_eq!(
            (clock.step(), error.errno()),
            (Step::Agent, Some(libc::ENOEXEC))
        );
        let order = [
            "loopback_up",
            "take",
            "change_directory",
            "write_file sys/kernel/shmmni 1",
            "set_hostname mine",
            "set_limit 7 5 6",
            "write_file proc/sys/kernel/msgmni 5",
            "resolve \"/proc/meminfo\"",
            "run_on",
            "arrange",
            "run [",
        ];
        let places: Vec<usize> = order.iter().map(|call| system.place(call)).collect();
        assert!(
            places.windows(2).all(|pair| pair[0] < pair[1]),
            "{places:?}"
        );
        let log = system.log.borrow();
        let same = log.iter().filter(|call| call.contains("shmmni"));
        assert_eq!(same.count(), 1);
    }

    #[test]
    fn the_new_process_ends_when_no_order_comes() {
        let parts = Parts::plain();
        let (job, file) = (parts.job(None), null());
        let system = Fake::talking(None);
        let inside = Inside {
            job: &job,
            ahead: true,
            written: None,
            go: &file,
            report: &file,
            socket: &file,
            cgroup: None,
            view: &[],
        };

        let error = become_agent(&system, &inside, &mut Clock::start(None));

        assert!(matches!(error, Error::Vanished));
        assert!(!system.log.borrow().iter().any(|call| call == "arrange"));
    }

    #[test]
    fn one_that_nobody_wants_leaves_nothing() {
        let system = Fake::new(None);

        let report = ordered(&system);

        assert!(report.launched.is_none() && report.failure.is_none());
        assert!(system.things.borrow().is_empty());
        assert!(!system
            .log
            .borrow()
            .iter()
            .any(|call| call.contains("overlay")));
    }

    #[test]
    fn one_whose_process_has_ended_leaves_nothing() {
        let mut system = Fake::new(None);
        system.child_has_ended = true;

        assert!(ordered(&system).failure.is_some());

        assert!(system.things.borrow().is_empty());
    }

    #[test]
    fn a_failure_at_any_call_leaves_nothing() {
        let order = order(request(|_| {}), None);
        for number in 0.. {
            let system = Fake::with_order(order.clone(), Some(number));
            let report = ordered(&system);
            if !system.has_failed() {
                assert!(number > 80 && report.launched.is_some());
                break;
            }
            let failure = report.failure.unwrap();
            assert_eq!(failure.errno.as_deref(), Some("EIO"), "call {number}");
            let left = system.things.borrow();
            assert!(left.is_empty(), "call {number} leaves {left:?}");
        }
    }

    #[test]
    fn a_step_that_fails_after_the_order_is_named_and_leaves_nothing() {
        for step in ["check", "clone", "overlay", "binds", "etc", "agent"] {
            let system = Fake::with_order(order(request(|_| {}), Some(step)), None);

            let failure = ordered(&system).failure.unwrap();

            assert_eq!(failure.step, step);
            assert!(system.things.borrow().is_empty(), "{step}");
        }
    }

    #[test]
    fn an_order_that_makes_no_sense_is_refused_and_leaves_nothing() {
        let wrong = [
            b"no order".to_vec(),
            order(b"no request".to_vec(), None),
            order(request(|plan| drop(plan.remove("hostname"))), None),
            order(
                request(|plan| drop(plan.insert("directory".into(), "relative".into()))),
                None,
            ),
        ];
        for order in wrong {
            let system = Fake::with_order(order, None);

            let failure = ordered(&system).failure.unwrap();

            assert_eq!(failure.errno.as_deref(), Some("EINVAL"));
            assert!(system.things.borrow().is_empty());
        }
    }

    #[test]
    fn only_a_plan_with_the_same_beginnings_is_served() {
        let made = Parts::plain().job(None).plan.clone();
        assert!(serves(&made, &made));
        let changes: [fn(&mut LaunchPlan); 8] = [
            |plan| plan.id_base += 1,
            |plan| plan.light = true,
            |plan| plan.shm_bytes *= 2,
            |plan| plan.masks.clear(),
            |plan| plan.upper_tmpfs_bytes = Some(1),
            |plan| drop(plan.cgroup1.remove("memory")),
            |plan| drop(plan.cgroup2_files.insert("cpu.weight".into(), "1".into())),
            |plan| plan.filter_agent = None,
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut wanted = made.clone();
            change(&mut wanted);
            assert!(!serves(&made, &wanted), "change {number}");
        }
        let mut wanted = made.clone();
        wanted.hostname = "other".into();
        wanted.cgroup2_files.insert("pids.max".into(), "7".into());
        assert!(serves(&made, &wanted));
    }

    #[test]
    fn an_order_longer_than_a_message_is_none() {
        let view = Shown::nothing();

        let order = Order::new(&[0; ORDER_BYTES_MAX], Vec::new(), Vec::new(), &view, None);

        assert!(order.encode().is_none());
    }
}
