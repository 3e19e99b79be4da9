"""Launches that lack one line of defence, or several: where an attempt that is refused otherwise gets further.

Each shows of its attempts that they would succeed, and which line it is that stops them. `python3 -m
tests.security.weakenings` writes the table of docs/internals/escapes.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Final

from dsec.security import capabilities
from tests.security.container_probes import PROBES

EVERY_CAPABILITY: Final = (1 << 41) - 1
_NO_FILTERS: Final = {"filter_agent": None, "filter_exec": None}
_ALL_CAPABILITIES: Final = {"caps_agent": EVERY_CAPABILITY, "caps_exec": EVERY_CAPABILITY}
_NO_MASKS: Final = {"masks": [], "readonly_proc": []}


@dataclass(frozen=True)
class Weakening:
    """What is missing, and the attempts that are not refused then."""

    lacks: str
    names: str  # separated by blanks; * at the end stands for the rest of a name
    changes: dict[str, Any] = field(default_factory=dict)  # of the launch plan
    outside: str = ""  # namespaces of the sandbox that the attempts are made outside of, and outside of its filters

    def attempts(self) -> list[str]:
        found: dict[str, None] = {}
        for word in self.names.split():
            matching = [name for name in PROBES if name.startswith(word[:-1])] if word.endswith("*") else [word]
            assert matching, word
            found.update(dict.fromkeys(matching))
        return list(found)


WEAKENINGS: Final = {
    "filters": Weakening(
        "the two seccomp filters",
        """
        call_io_uring_* call_userfaultfd call_add_key call_keyctl call_request_key call_bpf call_perf_event_open
        call_clock_adjtime call_adjtimex call_fanotify_init call_fanotify_mark call_move_pages call_mbind
        call_set_mempolicy call_migrate_pages call_process_madvise call_process_mrelease call_quotactl
        pidfd_of_agent_memory_reclaim lease_on_a_program contexts_of_asynchronous_io personality_without_randomisation
        terminal_TIOCSTI terminal_TIOCSETD file_request_set_flags file_request_set_version
        huge_pages_mapped* huge_pages_in_memory_file crash_handler_setrlimit crash_handler_prlimit
        crash_handler_by_the_high_half_of_an_argument
        socket_vsock socket_alg socket_can socket_bluetooth socket_tipc socket_rds socket_key
        socket_netlink_* socket_pair_of_another_family
        socket_ax25 socket_ipx socket_appletalk socket_netrom socket_x25 socket_rose socket_security socket_ash
        socket_atm socket_pppox socket_llc socket_mpls socket_rxrpc socket_isdn socket_phonet socket_ieee802154
        socket_caif socket_nfc socket_kcm socket_qipcrtr socket_smc socket_mctp
        """,
        _NO_FILTERS,
    ),
    "capabilities": Weakening(
        "the cut of capabilities",
        """
        capabilities_Prm capabilities_Eff capabilities_Bnd raise_capabilities prctl_securebits prctl_bounding_set
        agent_setting_timerslack_ns_as_root credentials_of_the_agent limits_of_agent_as_root scheduling_of_agent_*
        agent_rank_priority_as_* agent_rank_priority_of_group_* agent_rank_affinity_*
        agent_rank_policy_as_its_user agent_rank_parameters_as_its_user agent_rank_attributes_as_its_user
        agent_rank_disk_priority_as_its_user agent_rank_disk_priority_of_group_as_its_user
        agent_rank_disk_priority_of_user_as_its_user
        socket_raw_* socket_option_mark socket_option_high_priority socket_option_transparent socket_option_repair
        make_a_network_interface
        """,
        _ALL_CAPABILITIES,
    ),
    "filters and capabilities": Weakening(
        "the filters and the cut of capabilities, either of which is enough",
        """
        mount_tmpfs mount_devpts mount_mqueue mount_ramfs mount_bind remount_proc_sys_writable
        unmount_proc_sys mount_api_fsopen mount_api_fspick chroot
        unshare_mount unshare_cgroup unshare_uts unshare_ipc unshare_pid unshare_network
        clone_mount clone_cgroup clone_uts clone_ipc clone_pid clone_network
        setns_mnt setns_uts setns_net setns_pid change_host_name change_domain_name socket_packet uncover_*
        """,
        {**_NO_FILTERS, **_ALL_CAPABILITIES},
    ),
    "masks": Weakening(
        "the masks of /proc and /sys",
        """
        read_proc_cmdline read_proc_interrupts read_proc_iomem read_proc_ioports read_proc_swaps list_sys_firmware
        anything_writable_in_proc_outside_processes
        """,
        _NO_MASKS,
    ),
    "masks and capabilities": Weakening(
        "masks, filters and the cut of capabilities",
        "write_proc_sys_net_ipv4_ip_forward mount_proc",
        {**_NO_MASKS, **_NO_FILTERS, **_ALL_CAPABILITIES},
    ),
    "view of resources": Weakening(
        "the view of resources", "memory_of_the_host processors_of_the_host", {"view": None}
    ),
    "no_new_privs": Weakening(
        "no_new_privs",
        "no_new_privileges_is_off rise_by_a_set_user_id_program rise_by_file_capabilities",
        {"no_new_privs": False, "caps_agent": capabilities.AGENT_WITH_PRIVILEGE_GAIN},
    ),
    "network namespace": Weakening(
        "the network namespace", "abstract_socket_of_the_host loopback_port_of_the_host", outside="net"
    ),
    "ipc namespace": Weakening("the ipc namespace", "shared_memory_of_the_host", outside="ipc"),
    "pid namespace": Weakening("the pid namespace", "host_process_signal host_process_scheduling", outside="pid"),
    "mount namespace": Weakening(
        "the mount and the user namespace, and with them the filters, the bound on nested ones and the changed root",
        """
        files_of_the_host host_processes_in_proc list_sys_fs_cgroup list_sys_firmware
        unshare_user clone_user clone3_user_namespace
        """,
        outside="mount user",
    ),
    "user namespace": Weakening(
        "the user namespace, and with it the filters and the cut of capabilities",
        """
        agent_file_mem agent_file_maps agent_file_exe agent_file_auxv agent_file_smaps
        agent_file_pagemap agent_file_task_1_mem agent_file_clear_refs agent_file_io
        agent_place_fd agent_place_fdinfo agent_place_map_files agent_place_root agent_place_cwd
        namespaces_of_agent_* descriptors_of_the_agent memory_of_agent_* ptrace_agent_seize
        agent_setting_oom_score_adj_as_root agent_setting_timerslack_ns_as_root
        agent_setting_coredump_filter_as_root futexes_of_agent_as_root pidfd_of_agent_namespaces
        identity_beyond_the_range identity_of_the_host xattr_trusted xattr_opaque real_time_scheduling
        more_priority_than_given real_time_disk_priority
        socket_option_receive_buffer_by_force socket_option_send_buffer_by_force
        capabilities_Prm capabilities_Eff capabilities_Bnd
        """,
        outside="user",
    ),
}


def table() -> str:
    shown = {name for weak in WEAKENINGS.values() for name in weak.attempts()}
    lines = [
        "# Attempts and what stops them",
        "",
        f"Root of a sandbox makes {len(PROBES)} attempts in `tests/security/container_probes`. All are refused, and",
        f"for the reason that each declares. Of these, {len(shown)} are made again where a line of defence is missing,",
        "and get further: so they would be seen to succeed, and it is known what stops them. The others have more",
        "lines before them than these launches lack, or aim at what the kernel of the test may not have.",
        "`tests/security/weakenings.py` is the source of this table and of the test's.",
        "",
        "| with all but | attempts | which |",
        "| --- | --- | --- |",
    ]
    for weak in WEAKENINGS.values():
        names = weak.attempts()
        lines.append(f"| {weak.lacks} | {len(names)} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(table())
