use super::*;
use crate::fake::{Fake, Parts};

#[test]
fn what_later_steps_need_comes_first() {
    let (parts, system) = (Parts::new(), Fake::new(None));

    let launched = launch(&system, &parts.job(None)).unwrap();

    assert_eq!(
        (launched.pid, launched.start_ticks, launched.cgroup_id),
        (4242, 777, 7)
    );
    let order = [
        "make_dir /cg2/s",
        "write_file /cg2/s/pids.max",
        "write_file /cg1/cpuset/s/cpuset.",
        "write_file /cg1/cpuset/s/a",
        "listen",
        "enter_mounts",
        "act_as 1879048192",
        "clone",
        "make_dir /state/s ",
        "attach_at \"/state/s/disk\"",
        "make_dir /state/s/disk/upper",
        "clone_mount \"/layers/base\"",
        "cloned",
        "write_file /proc/4242/uid_map 0 1879048192 65536",
        "open_namespace /proc/4242/ns/user",
        "write m",
        "attach_at \"/scratch\"",
        "make_proc 0xe",
        "bind \"/empty/directory\" \"kcore\"",
        "map_ids",
        "make_mount \"overlay\" 0x4",
        "attach_at \"/root\"",
        "resolve \"/data\"",
        "resolve \"/data/in\"",
        "resolve \"/usr\"",
        "resolve \"/usr/bin\"",
        "resolve \"/usr/bin/tool\"",
        "resolve \"/etc/hosts\"",
        "write r",
        "read_file /proc/4242/stat",
    ];
    let places: Vec<usize> = order
        .iter()
        .map(|call| match *call {
            "clone" => system
                .log
                .borrow()
                .iter()
                .position(|entry| entry == "clone")
                .unwrap(),
            call => system.place(call),
        })
        .collect();
    assert!(
        places.windows(2).all(|pair| pair[0] < pair[1]),
        "{places:?} {:#?}",
        system.log.borrow()
    );
    assert!(
        system.place("write_file /cg1/cpuset/s/a")
            > system.place("write_file /cg1/cpuset/s/cpuset.mems")
    );
}

#[test]
fn a_kept_cgroup_is_taken_as_it_is() {
    let (parts, system) = (Parts::with_kept_cgroup(), Fake::new(None));

    launch(&system, &parts.job(None)).unwrap();

    let (renamed, joined) = (
        system.place("rename /cg1/cpuset/kept"),
        system.place("open /cg1/cpuset/s/tasks"),
    );
    assert!(renamed < joined);
    let log = system.log.borrow();
    let touched = |call: &str| log.iter().any(|entry| entry.starts_with(call));
    assert!(!touched("make_dir /cg1/cpuset") && !touched("write_file /cg1/cpuset"));
    assert!(touched("make_dir /cg1/memory/s"));
}

#[test]
fn a_light_sandbox_begins_in_namespaces_that_are_nobodys() {
    let (parts, system) = (Parts::light(), Fake::new(None));

    launch(&system, &parts.job(None)).unwrap();

    let (network, ipc) = (
        system.place("enter 0x40000000"),
        system.place("enter 0x8000000"),
    );
    let clone = system
        .log
        .borrow()
        .iter()
        .position(|entry| entry == "clone");
    assert!(Some(network.max(ipc)) < clone);
}

#[test]
fn layers_by_name_are_in_sight_only_while_the_overlay_is_made() {
    let (parts, system) = (Parts::new(), Fake::new(None));
    let job = Job {
        layers_by_name: true,
        ..parts.job(None)
    };

    launch(&system, &job).unwrap();

    let order = [
        "act_as 1879048192",
        "attach_at \"/scratch\"",
        "make_mount \"overlay\"",
        "detach_at /scratch",
        "attach_at \"/root\"",
    ];
    let places: Vec<usize> = order.iter().map(|call| system.place(call)).collect();
    assert!(
        places.windows(2).all(|pair| pair[0] < pair[1]),
        "{places:?} {:#?}",
        system.log.borrow()
    );
}

#[test]
fn no_process_is_moved_by_a_list_of_processes() {
    let (parts, system) = (Parts::new(), Fake::new(None));

    launch(&system, &parts.job(None)).unwrap();

    let log = system.log.borrow();
    let moving =
        |entry: &&String| entry.contains("cgroup.procs") && !entry.starts_with("change_owner");
    assert_eq!(log.iter().find(moving), None);
    assert!(log
        .iter()
        .any(|entry| entry == "open /cg1/cpuset/s/tasks Write"));
}

#[test]
fn limits_are_not_given_away() {
    let (parts, system) = (Parts::new(), Fake::new(None));

    launch(&system, &parts.job(None)).unwrap();

    let log = system.log.borrow();
    let given: Vec<&String> = log
        .iter()
        .filter(|entry| entry.starts_with("change_owner"))
        .collect();
    let good = |entry: &str| {
        let path = entry.split(' ').nth(1).unwrap();
        let file = path.rsplit('/').next().unwrap();
        matches!(
            file,
            "" | "work" | "cgroup.procs" | "cgroup.threads" | "cgroup.subtree_control"
        )
    };
    assert!(
        given.iter().all(|entry| good(entry)) && given.len() == 8,
        "{given:?}"
    );
}

#[test]
fn a_launch_that_fails_at_any_call_leaves_nothing() {
    for layers_by_name in [false, true] {
        fails_at_every_call(Parts::new(), layers_by_name);
    }
    fails_at_every_call(Parts::light(), false);
    fails_at_every_call(Parts::with_kept_cgroup(), false);
}

fn fails_at_every_call(parts: Parts, layers_by_name: bool) {
    let mut number = 0;
    loop {
        let system = Fake::new(Some(number));
        let job = Job {
            layers_by_name,
            ..parts.job(None)
        };
        let result = launch(&system, &job);
        if !system.has_failed() {
            assert!(result.is_ok());
            break;
        }
        let failure = result.unwrap_err();
        assert_eq!(
            failure.errno.as_deref(),
            Some("EIO"),
            "call {number}: {failure:?}"
        );
        let left = system.things.borrow();
        assert!(
            left.is_empty(),
            "call {number} leaves {left:?} of {:#?}",
            system.log.borrow()
        );
        number += 1;
    }
    assert!(number > 80, "only {number} calls");
}

#[test]
fn the_failing_step_is_named() {
    let outside =
        "check cgroups directories socket clone cgroups_v1 maps overlay volumes binds etc proc masks agent";
    for name in outside.split(' ') {
        let (parts, system) = (Parts::new(), Fake::new(None));

        let failure = launch(&system, &parts.job(Some(name))).unwrap_err();

        assert_eq!(
            (failure.step.as_str(), failure.errno.as_deref()),
            (name, Some("EIO"))
        );
        assert!(
            system.things.borrow().is_empty(),
            "{name} leaves {:?}",
            system.things.borrow()
        );
    }
}
