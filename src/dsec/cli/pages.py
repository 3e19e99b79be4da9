"""What there is to say of each command beside its options: how it behaves, examples, JSON, exit status.

`--help` shows the examples; `dsec help COMMAND`, the manual page and the reference show all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dsec.cli.page import OF_SERVICE, Page
from dsec.cli.page_of_clusters import CLUSTER
from dsec.cli.page_of_jobs import JOBS
from dsec.cli.page_of_machines import MACHINES

if TYPE_CHECKING:
    import typer

EXITS: Final = {
    0: "done",
    2: "wrong usage: nothing was done",
    125: "dsec refused or failed, also where something is not there; the last line says what to try",
    129: "SIGHUP: as after Ctrl-C, what was under way is ended first",
    130: "Ctrl-C",
    141: "whoever reads its output has gone",
    143: "SIGTERM: as after Ctrl-C, what was under way is ended first",
}
JSON: Final = (
    "With --json stdout has the answer alone, in one line: a record; for `ls` and what else lists, a list of records "
    "(audit and usage: a record that holds lists, as they come in pages); for `rm`, removed: a list. What follows, as "
    "events and logs, is a line for each. An error is error: code, message, hint, detail, and the exit status as ever. "
    "Progress stays on stderr."
)
_OF_COMMANDS: Final = {
    124: "--timeout ended the command",
    126: "the program cannot be run",
    127: "the program is not there",
}
_RESULT: Final = (
    "one object with sandbox, exec, status, exit_code, signal, cause, timed_out, stdout, stderr, truncated, gaps and "
    "usage"
)
_SANDBOX: Final = "a Sandbox record"

PAGES: Final[dict[str, Page]] = {
    "project create": Page(
        "Its parent must be there, and you need the right manage over that.",
        (("dsec project create /team/run-7", "below /team"),),
        "a ProjectInfo record",
    ),
    "project ls": Page(
        "", (("dsec project ls /team", "that one and those below it"),), "a list of ProjectInfo records"
    ),
    "project show": Page("", (("dsec project show /team", "with its quota and its policy"),), "a ProjectInfo record"),
    "project rm": Page(
        "Projects below it, and its sandboxes, snapshots and volumes, go first; its jobs go with it.",
        (("dsec project rm /team/run-7", "it is over"),),
        "removed",
    ),
    "project policy": Page(
        "What is not given stays; `none` takes a rule away. A policy binds the project and all below it. Takes the "
        "right manage over the project above. Sandboxes that live already are left alone.",
        (
            ("dsec project policy /team --cpu 4 --memory 8GiB --ttl 86400", "at most, each"),
            ("dsec project policy /team --environment 'python-*' --cpu none", "other rules"),
        ),
        "a ProjectInfo record",
    ),
    "quota show": Page(
        "A cap of a project counts its sandboxes and those of all projects below it; the nearest to its limit refuses.",
        (("dsec quota show /team/run-7", "its own caps, and those above it"),),
        "a QuotaInfo record",
    ),
    "quota set": Page(
        "A cap is at most that of every project above. Takes the right manage over the project above, so that nobody "
        "sets what binds their own; the root's takes the right admin.",
        (
            ("dsec quota set /team --sandboxes 100 --memory 200GiB", "of all together"),
            ("dsec quota set /team --backend container --cpu 64", "of one substrate"),
            ("dsec quota set /team --memory none", "takes it away"),
        ),
        "a QuotaInfo record",
    ),
    "grant add": Page(
        "It lasts as long as the right that you have it by, and as you: when either goes, so does this. "
        "Takes the right manage over the project.",
        (("dsec grant add lead@/team /team/run-7 --right manage", "one may manage it"),),
        "a GrantInfo record",
    ),
    "grant ls": Page("", (("dsec grant ls", "who may do what"),), "a list of GrantInfo records"),
    "grant rm": Page(
        "", (("dsec grant rm grt_0123456789abcdef", "from the next request on"),), "revoked: a list of ids"
    ),
    "principal ls": Page("", (("dsec principal ls", "who tokens are for"),), "a list of PrincipalInfo records"),
    "principal rm": Page(
        "", (("dsec principal rm agent@/team/run-7", "and all that it has handed on"),), "removed: a list of ids"
    ),
    "events": Page(
        "Without -f it ends with what has happened by now. Each event has a position, with which another reading goes "
        "on; an event `gap` stands for what is not kept any more (three days, and less where much happens).",
        (
            ("dsec events -f --label run=7", "as it happens"),
            ("dsec events --kind failed --json", "which failed, for programs"),
        ),
        "one Event record a line",
    ),
    "audit": Page(
        "Changes and refused ones, with who asked; not what runs inside sandboxes (`dsec logs`). Kept for ninety days, "
        "at most 200,000.",
        (("dsec audit --principal ci@/team", "what one has done"),),
        "an AuditPage record: entries and lost",
    ),
    "explain": Page(
        "The same checks as of `dsec create`, without one: policies and caps of the project and of those above, then "
        "each node, with how full it is and why it would refuse.",
        (
            ("dsec explain --memory 64GiB", "would it fit"),
            ("dsec explain --label zone=a", "which nodes could"),
        ),
        "an Explanation record",
        {1: "it would be refused"},
    ),
    "usage": Page(
        "Of a project and those below it: seconds of processor, memory over time, how long sandboxes lived and were "
        "paused, and output of their commands. Records of single sandboxes are kept for five weeks, sums of days (UTC, "
        "on which they ended) for 400 days.",
        (
            ("dsec usage /team --since 7d", "a week, by project"),
            ("dsec usage --by day", "by day"),
            ("dsec usage --by sandbox --json", "each of them"),
        ),
        "a UsagePage record: totals, records, next and missing",
    ),
    "whoami": Page("", (("dsec whoami", "and in which project you act"),), "a WhoAmI record"),
    "up": Page(
        "It answers at its socket and, with --listen, on TCP. In the foreground it logs to stderr until Ctrl-C; with "
        "--detach it goes on by itself and logs to a file in its state directory.\n\n"
        "The other commands start it, with default settings, when nobody answers at the local socket. Flags win over "
        "DSEC_* variables, and those over the configuration file.",
        (
            ("dsec up --detach", "start it, and return when it answers"),
            ("dsec up --listen 127.0.0.1:8080", "also on TCP; `dsec token create` makes the tokens"),
        ),
        "with --detach: pid, socket and log",
        OF_SERVICE,
    ),
    "down": Page(
        "Requests under way get their grace. With --destroy all sandboxes are destroyed first, and everything that "
        "outlives the service is removed. Nothing to stop is fine.",
        (("dsec down", "stop it; sandboxes run on"), ("dsec down --destroy", "end everything")),
        "pid (null: nothing ran), destroyed, sandboxes (that run on)",
        OF_SERVICE,
    ),
    "doctor": Page(
        "When a service answers, it is asked. When none does, this machine is examined from outside and no service is "
        "started; a container is made for trial where that is possible. Every lack is told with what it costs and how "
        "to get it. Works without root and before anything is set up.",
        (("dsec doctor", "the report"), ("dsec doctor -v", "with the details of what is fine")),
        "a DoctorReport record: node, version, substrates, and findings of what, status (ok, degraded, missing), need "
        "(needed, advised, optional), detail, cost and hint",
        {1: "something needed is missing"},
    ),
    "run": Page(
        "The sandbox is destroyed when the command has ended, however that comes, and after an hour without use if "
        "this program is killed. Options come before the command; what follows it is its own.",
        (
            ("dsec run -- python3 -c 'print(1 + 1)'", "one command"),
            ("dsec run --timeout 600 -c 'make && make test'", "text for a shell, with a time limit"),
            ("tar c . | dsec run -i -c 'tar x && ls'", "with our standard input"),
        ),
        _RESULT,
        _OF_COMMANDS,
    ),
    "exec": Page(
        "Its output is shown as it comes, stdout on stdout and stderr on stderr. Ctrl-C kills it. With --detach it is "
        "only started, and its id printed: `dsec logs` shows what it says. Options come before SANDBOX.",
        (
            ("dsec exec box -- make -j2 test", "arguments as they are"),
            ("dsec exec -c box 'cd /work && ls | wc -l'", "text for a shell"),
            ("dsec exec --session s -c box 'cd /work'", "in a lasting shell: the next command of s is in /work"),
            ("dsec exec -d box sleep 100", "in the background"),
        ),
        _RESULT + "; with --detach sandbox and exec",
        _OF_COMMANDS,
    ),
    "call": Page(
        "The code goes to a container that was made before, alone with its files, and nothing of it stays. TYPE says "
        "what it is and how it is run; compiled types are compiled first. What it needs beside the code comes with "
        "--file. Words after CODE are its arguments; after `--` also those that begin with -.\n\n"
        "The exit status is the program's, 128 + n when signal n ended it, 124 at its time limit, 137 at its memory "
        "limit, 125 at its output limit.",
        (
            ("dsec call python -c 'print(1 + 1)'", "code from the command line"),
            ("dsec call cpp main.cpp --stdin < input", "a file, compiled and run, with our standard input"),
            ("dsec call python solve.py --file data.csv --collect out.png", "with a file, and one given back"),
        ),
        "status, compile, run, files (of --collect), missing, queued_s and took_s; output in base64",
        _OF_COMMANDS,
    ),
    "calls types": Page("", (("dsec calls types", "what can be called"),), "a list of TaskTypeInfo records"),
    "calls pools": Page("", (("dsec calls pools", "the containers for calls, now"),), "a list of CallPool records"),
    "logs": Page(
        "Without EXEC the sandbox's commands are listed. EXEC is an id, `main` for the environment's own program, or "
        "`latest` for the one started last. Old records make room for new ones. Those of a sandbox that has ended "
        "are kept for a day, if there is room. "
        "--follow goes on until the command ends; Ctrl-C ends only the looking.",
        (
            ("dsec logs box", "its commands"),
            ("dsec logs box latest -f", "follow the last one"),
            ("dsec logs box main --tail 20", "the last 20 lines"),
            ("dsec logs box --since 10m", "the commands started in the last ten minutes"),
        ),
        "a list of ExecInfo records; with EXEC a line for each piece: stream, offset, data (base64) and text",
    ),
    "top": Page(
        "One line for each sandbox that lives: processor use between two looks (100 is one core), memory, disk, "
        "processes and running commands. It needs a terminal to go on; into a pipe, or with --once, it writes the "
        "table once. q or Ctrl-C ends it.",
        (
            ("dsec top", "live, by processor use"),
            ("dsec top --sort memory", "the largest first"),
            ("dsec top --once --json", "for programs"),
        ),
        "a list of id, name, project, state, cpu_percent, memory_bytes, memory_limit_bytes, disk_used_bytes, pids, "
        "execs_live, age_s and asleep; null: the host cannot tell",
    ),
    "shell": Page(
        "All keys go to the sandbox, Ctrl-C too. It ends with the shell; when this terminal goes away, what runs in it "
        "is hung up.",
        (("dsec shell box", "a login shell"), ("dsec shell box vim", "something else on a terminal")),
        "",
        _OF_COMMANDS,
    ),
    "create": Page(
        "It lives until `dsec rm`, or until --ttl-running or --ttl-idle is over. A name may be used wherever an id "
        "may. What the node cannot do is refused; nothing weaker is chosen instead. Ctrl-C undoes it.",
        (
            ("dsec create base --name box", "a sandbox named box"),
            ("dsec create base --memory 2GiB --cpu 2 --ttl-idle 600", "larger, and gone after ten idle minutes"),
            ("dsec create postgres --start --ready-port 5432", "with the environment's own program"),
            ("dsec create base --network proxied --egress packages.example", "with one place that it reaches"),
        ),
        _SANDBOX,
    ),
    "ls": Page(
        "Those of your project and of projects below it. With --all also those that have ended within a day, with why.",
        (("dsec ls", "what lives"), ("dsec ls -q --label run=7", "ids of some")),
        f"a list of {_SANDBOX.removeprefix('a ')}s",
    ),
    "egress": Page(
        "Without options it says what the rules are, one a line. Rules are HOST[:PORTS]: a name (ports 80 and 443), "
        "*.NAME for all below it, an address or a network; `:*` is every port. What --allow gives replaces all rules; "
        "connections that are still allowed go on, the others are cut.",
        (
            ("dsec egress box", "what it reaches"),
            ("dsec egress box --allow packages.example --allow files.example", "while packages are installed"),
            ("dsec egress box --allow none", "nothing any more"),
        ),
        _SANDBOX,
    ),
    "pause": Page(
        "It takes no processor; its memory stays, and goes to swap where the node pages out. The next use resumes it, "
        "and its times to live stand still. With --deep a virtual machine's memory goes to the disk, and it outlives a "
        "reboot of its node.",
        (("dsec pause box", "until it is used again"), ("dsec pause --deep vm", "keeps no memory")),
        f"a list of {_SANDBOX.removeprefix('a ')}s",
    ),
    "resume": Page(
        "One that runs already is fine.",
        (("dsec resume box", "before its next use, which would do it"),),
        f"a list of {_SANDBOX.removeprefix('a ')}s",
    ),
    "rm": Page(
        "All that runs in it is killed, and its files are removed. One that has ended already is fine. By a "
        "name that nothing has, nothing is destroyed.",
        (("dsec rm box", "by name"), ("dsec rm --label run=7", "by label"), ("dsec rm --all", "every one of yours")),
        "destroyed: a list of ids",
    ),
    "cp": Page(
        "As cp -r does: a file to a name or into a directory; of a directory its content. A broken connection is taken "
        "up where it broke. What comes out of a sandbox is not trusted: what could land outside TARGET, devices and "
        "pipes are left out, and named.",
        (
            ("dsec cp ./project box:/work", "in"),
            ("dsec cp box:/work/report.xml .", "out"),
        ),
        "bytes, entries, and skipped: a list of names with reasons",
    ),
    "env build": Page(
        "Exactly one of --debian, --registry, --oci, --docker-archive, --dockerfile, --directory, --tar and --store "
        "says what from. Paths are read by the service. The same request again is done at once. Needs the right admin.",
        (
            ("dsec env build base --debian", "the usual one: Python, git, bash, build tools"),
            ("dsec env build tools --debian bash ripgrep", "named packages and what they need"),
            ("dsec env build deb --registry debian:12", "an image of a registry, with the accounts of the service"),
            ("dsec env build image --oci ./layout", "an OCI image layout directory"),
            ("dsec env build mine --dockerfile ./project", "a Dockerfile, where buildah is installed"),
            (
                "dsec env build tools --store https://images.example/layers",
                "pushed by another node; loaded as it is read",
            ),
        ),
        "an EnvironmentInfo record",
    ),
    "image pull": Page(
        "A name without a host is one of Docker Hub. The account is that of the service's user: $REGISTRY_AUTH_FILE, "
        "$DOCKER_CONFIG/config.json or ~/.docker/config.json, with docker's credential helpers. What broke off goes on "
        "where it did. Needs the right admin.",
        (
            ("dsec image pull debian:12", "as the environment debian:12"),
            ("dsec image pull registry.example/team/tools:1.4 tools --replace", "under another name, which may exist"),
        ),
        "an EnvironmentInfo record",
    ),
    "image push": Page(
        "One layer of the image for each of the environment; what the registry has is not sent again. Prints the name "
        "of the image with its digest. Needs the right admin.",
        (
            ("dsec image push tools registry.example/team/tools:1.4", "for docker, podman and others"),
            ("dsec image push tools registry.example/team/tools --compression zstd", "quicker and smaller"),
        ),
        "an ExportedImage record",
    ),
    "image export": Page(
        "The path is the node's. Needs the right admin, at the node's own socket.",
        (
            ("dsec image export tools --docker-archive tools.tar", "then `docker load -i tools.tar`"),
            ("dsec image export tools --oci ./layout", "an OCI image layout; others in it stay"),
        ),
        "an ExportedImage record",
    ),
    "env create": Page(
        "Later parts hide what earlier ones have in the same place. The environment is locked to what its parts are "
        "now, until `dsec env update`; with --follow they are looked up at each create of a sandbox. Parts may be made "
        "of others themselves, four deep. Needs the right admin.",
        (
            (
                "dsec env create task --base debian:12 --workspace repo --toolkit ripgrep",
                "three parts, one above another",
            ),
            ("dsec env create dev --base base --toolkit tools:1.4 --follow", "whatever the tag is at each create"),
        ),
        "an EnvironmentInfo record",
    ),
    "env update": Page(
        "What it was is there as NAME@DIGEST until it is collected. Needs the right admin.",
        (("dsec env update task", "new versions of its parts from now on"),),
        "an EnvironmentInfo record",
    ),
    "env diff": Page(
        "Removed layers are shown with -, added ones with +; then parts and configuration that differ.",
        (
            ("dsec env diff task@0123456789ab task", "what an update has changed"),
            ("dsec env diff debian:12 debian:13", "two environments"),
        ),
        "an EnvironmentDiff record",
    ),
    "env pull": Page(
        "The same as `dsec env build NAME --store STORE`. Needs the right admin.",
        (("dsec env pull s3://bucket/layers tools:1.4", "under the name that it has there"),),
        "an EnvironmentInfo record",
    ),
    "layer build": Page(
        "The same as `dsec env build`: what is made can be a part of environments, or one by itself. An image keeps "
        "one layer for each of its own, shared with other images that have them; everything else is one layer. Needs "
        "the right admin.",
        (
            ("dsec layer build ripgrep:14 --dir ./ripgrep", "a toolkit, from a directory of the node"),
            (
                "dsec layer build repo --git https://host/repo.git@0123456789abcdef0123456789abcdef01234567",
                "a workspace",
            ),
        ),
        "an EnvironmentInfo record",
    ),
    "layer ls": Page("", (("dsec layer ls", "what there is, and who has it"),), "a list of LayerInfo records"),
    "layer show": Page("", (("dsec layer show 0123456789ab", "its size, and who has it"),), "a LayerInfo record"),
    "layer stats": Page(
        "As `dsec env stats`, of layers by their digests.",
        (("dsec layer stats", "of all layers"),),
        "a list of LayerUse records",
    ),
    "layer rm": Page(
        "Refused while an environment or a sandbox has it. Needs the right admin.",
        (("dsec layer rm 0123456789ab", "one that nothing has"),),
        "removed: a list of digests",
    ),
    "layer collapse": Page(
        "Environments of more than 16 layers only; the 8 highest are left alone. Creates use the one layer from then "
        "on, and sandboxes see the same. It is done by itself when such an environment is built or put together. Needs "
        "the right admin.",
        (("dsec layer collapse task", "once, for all sandboxes to come"),),
        "an EnvironmentInfo record",
    ),
    "env ls": Page("", (("dsec env ls", "what sandboxes may start from"),), "a list of EnvironmentInfo records"),
    "env show": Page("", (("dsec env show base", "size, layers, program and user"),), "an EnvironmentInfo record"),
    "env rm": Page("", (("dsec env rm tools", "the name, and layers that nothing uses"),), "removed: a list of names"),
    "env push": Page(
        "Other nodes build from it with `dsec env build NAME --store STORE`. The store is a directory on any mounted "
        "file system or an S3 bucket; it is made where there is none, and what is there already is left as it is. "
        "Needs the right admin.",
        (
            ("dsec env push tools file:///mnt/shared/layers", "a directory that other nodes have, too"),
            ("dsec env push tools s3://bucket/layers", "a bucket; credentials are those of the service"),
        ),
        "an EnvironmentInfo record",
    ),
    "env stats": Page(
        "SIZE is the content of a layer, PRESENT what of it is on this node, TOUCHED what was wanted of it, FETCHED "
        "what came from the store, compressed. Of local layers no reads are counted.",
        (("dsec env stats tools", "how much has been loaded, and why the store failed last"),),
        "an EnvironmentStats record",
    ),
    "env trace": Page(
        "Nodes that build the environment afterwards load what was read here before it is asked for. Do what is "
        "usually done in a sandbox first. Needs the right admin.",
        (("dsec env trace tools", "into the store that it came from"),),
        "an EnvironmentTrace record",
    ),
    "snapshot create": Page(
        "The sandbox stands still for a moment. Processes, memory, /dev/shm and volumes are not kept. Without a name "
        "it goes by its id.",
        (("dsec snapshot create box built", "before trying something"),),
        "a SnapshotInfo record",
    ),
    "snapshot ls": Page(
        "SIZE is what the snapshot adds to those below it.",
        (("dsec snapshot ls", "all of your project"), ("dsec snapshot ls --sandbox sbx_…", "of one sandbox")),
        "a list of SnapshotInfo records",
    ),
    "snapshot show": Page("", (("dsec snapshot show built", "of which sandbox, when"),), "a SnapshotInfo record"),
    "snapshot rm": Page(
        "Refused while sandboxes that were made from it live; the message says which.",
        (("dsec snapshot rm built", "its layers go when nothing else has them"),),
        "removed: a list of names",
    ),
    "snapshot publish": Page(
        "One layer is made of what the snapshot has above its environment, for sandboxes of every project. What the "
        "rules of residue name is left out: temporary, caches, package-lists, bytecode, logs, histories, ssh, "
        "credentials, and those of the node's configuration. Needs the right admin.",
        (
            ("dsec snapshot publish built project --dry-run", "what would be left out"),
            ("dsec snapshot publish built tools:2 --toolkit --keep bytecode", "as a toolkit"),
        ),
        "a Published record",
    ),
    "fork": Page(
        "The new sandboxes have its limits, variables, labels and times to live, but no name. Its processes are not "
        "copied.",
        (("dsec fork box -n 8", "says eight ids"),),
        "a list of Sandbox records",
    ),
    "rollback": Page(
        "Id, name and limits stay. Nothing is started again.",
        (("dsec rollback box built", "to the files of that moment"),),
        "a Sandbox record",
    ),
    "gc": Page(
        "What names of environments stood for before they were replaced, a week ago or longer; layers that no "
        "environment, snapshot or sandbox has; images of registries that were not used for a week; remains of killed "
        "processes. Never volumes, snapshots, or what a name stands for. The node does it by itself when its disk is "
        "short of room (node.collect.free_bytes_min), and then takes caches before their time. Needs the right admin.",
        (("dsec gc --dry-run", "what would go, and why"), ("dsec gc", "remove it")),
        "a GcReport record",
    ),
    **MACHINES,
    **JOBS,
    "volume create": Page(
        "It belongs to your project and outlives sandboxes. With --size no more can be written in it, in bytes and in "
        "files; refused where that cannot be kept. --owner for images whose programs do not run as root. Needs the "
        "right admin.",
        (
            ("dsec volume create data --size 10GiB", "a directory for up to 10 GiB"),
            ("dsec volume create cache --owner 1000", "which user 1000 may write in"),
        ),
        "a VolumeInfo record",
    ),
    "volume ls": Page(
        "USED of a volume without a limit is counted only by `dsec volume show`. Datasets are directories of the node "
        "that its configuration names; every sandbox may read them.",
        (("dsec volume ls", "yours, and the node's datasets"),),
        "a list of VolumeInfo records",
    ),
    "volume show": Page("", (("dsec volume show data", "its size, and who has it"),), "a VolumeInfo record"),
    "volume rm": Page(
        "Refused while a sandbox has it. There is no way back. Needs the right admin.",
        (("dsec volume rm data", "with all that is in it"),),
        "removed: a list of names",
    ),
    "token create": Page(
        "The token is printed, this once. It is good for the project and all below it; project, principal and grant "
        "are made when they are new. Takes the right manage over the project, and gives no more than you have.\n\n"
        "Rights: read; use (create, run, destroy); manage (projects, tokens, grants, quotas of what is below); admin "
        "(of / only: environments, the service itself). Each includes the one before.",
        (
            ("dsec token create ci --project /team --ttl 86400", "for a day, for one project"),
            ("dsec token create agent --project /team/run --right manage", "an agent that makes projects of its own"),
        ),
        "token, and info: a TokenInfo record",
    ),
    "token rotate": Page(
        "Who holds a token may rotate it, without gaining time by that; so may who manages its project. To revoke a "
        "token revokes those that came of it by rotation, too.",
        (
            ("dsec token rotate --overlap 600", "ten minutes to put the new one in the place of your own"),
            ("dsec token rotate tok_0123456789abcdef --overlap 0", "one that may have leaked"),
        ),
        "token, and info: a TokenInfo record",
    ),
    "token ls": Page("", (("dsec token ls", "who may call"),), "a list of TokenInfo records"),
    "token rm": Page(
        "", (("dsec token rm tok_0123456789abcdef", "from the next request on"),), "revoked: a list of ids"
    ),
    **CLUSTER,
    "completion": Page(
        "Prints a script that completes commands, options, sandboxes, environments and commands on record. It asks the "
        "service, if one answers, for a second at most.",
        (
            ("dsec completion bash > /etc/bash_completion.d/dsec", "for all users of bash"),
            ('dsec completion zsh > "${fpath[1]}/_dsec"', "for zsh"),
            ("dsec completion fish > ~/.config/fish/completions/dsec.fish", "for fish"),
        ),
    ),
    "help": Page("", (("dsec help exec", "all there is to say of a command"),)),
}
_PLACE: Final = "\b\n"  # what follows is shown as it is written


def command(
    app: typer.Typer, function: Callable[..., Any], name: str | None = None, *, of: str = "", **more: Any
) -> None:
    """Registers `function` as a command (of the group `of`), with its page's examples below its help."""
    called = name or function.__name__
    app.command(name=called, epilog=_epilog(f"{of} {called}".strip()), **more)(function)


def _epilog(name: str) -> str:
    width = max((len(typed) for typed, _ in PAGES[name].examples), default=0)
    width = min(width, 48)
    lines = [f"  {typed:<{width}}  {meaning}" for typed, meaning in PAGES[name].examples]
    return "\n\n".join([_PLACE + "\n".join(["Examples:", *lines]), f"`dsec help {name}` says more."])
