"""What there is to say of full machines and their screens."""

from __future__ import annotations

from typing import Final

from dsec.cli.page import Page

MACHINES: Final[dict[str, Page]] = {
    "vm build": Page(
        "Packages come from the sources that the node's own apt uses; it takes minutes. The system boots its kernel "
        "directly and has our agent as a service: commands, sessions and files work as everywhere.",
        (
            ("dsec vm build deb --debian", "a small system"),
            ("dsec vm build desk --debian --desktop firefox-esr", "with a screen to work at"),
        ),
        "a MachineInfo record",
    ),
    "vm import": Page(
        "The format is as said, never guessed; a qcow2 that stands on other files is refused. The first sandbox of a "
        "shape boots the disk, and is saved --boot-wait seconds after power on, or after its agent's first answer; all "
        "others go on from there. A node of a cluster has no socket: with --state-dir root puts the image there "
        "itself, beside a node that runs; machines of it are created with --node.",
        (
            ("dsec vm import android android.img --format raw --bus sata", "a system without an agent"),
            ("dsec vm import debian disk.qcow2 --format qcow2 --agent qga", "one with qemu-guest-agent"),
            ("dsec vm import desk desk.img --format raw --state-dir /var/lib/dsec", "on a node of a cluster"),
        ),
        "a MachineInfo record",
    ),
    "vm export": Page(
        "A file of the node that is not there yet; what is empty takes no room. Of a machine: `dsec vm commit` first. "
        "It needs qemu-img.",
        (("dsec vm export desk /srv/desk.qcow2 --format qcow2", "for another program"),),
        "a DiskFile record",
    ),
    "snapshot export": Page(
        "Of a machine, as after a power cut at that moment (`sync` inside before). Of a microvm it is the disk that it "
        "writes to: ext4, with what differs from its environment in `upper`. A file of the node that is not there "
        "yet; what is empty takes no room. It needs qemu-img.",
        (("dsec snapshot export ready /srv/ready.img", "the disk as it was then"),),
        "a DiskFile record",
    ),
    "vm ls": Page("", (("dsec vm ls", "what machines can begin as"),), "a list of MachineInfo records"),
    "vm push": Page(
        "A directory (file:///DIR), or a bucket (s3://BUCKET/PREFIX). What is there already stays as it is: of an "
        "image above another only what lies above goes there. It prints the digest, which names all that will be read.",
        (("dsec vm push desk file:///srv/layers", "for other nodes"),),
        "a MachineInfo record, with digest",
    ),
    "vm pull": Page(
        "Nothing of the disk is copied: machines read it through dsec-loader, which fetches, checks and keeps what "
        "they read.",
        (
            ("dsec vm pull desk https://host/layers", "from a web server, a directory or a bucket"),
            ("dsec vm pull desk file:///srv/layers --digest 4f3c2b1a9d8e7f60", "this one and no other"),
        ),
        "a MachineInfo record",
    ),
    "vm commit": Page(
        "As after a power cut at this moment: run `sync` in it first. What it has written becomes a layer above the "
        "image that it began as; nothing else is copied. The machine stands still meanwhile, and goes on.",
        (("dsec vm commit ready pc", "create others from it: dsec create ready --backend fullvm"),),
        "a MachineInfo record",
    ),
    "vm collapse": Page(
        "All layers above the lowest become one, by qemu-img. Chains that would have more than 16 layers are collapsed "
        "by themselves. Machines of the image run on.",
        (("dsec vm collapse ready", "a shorter chain"),),
        "a MachineInfo record",
    ),
    "vm trace": Page(
        "Nodes that pull the image afterwards load what was read here before it is asked for. Boot a machine of it, "
        "and do what is usually done there, first.",
        (("dsec vm trace ready", "into the store that it came from"),),
        "an EnvironmentTrace record",
    ),
    "vm doctor": Page(
        "What `dsec doctor` says of machines: whether KVM works or they are emulated, which monitor and which kernel "
        "for guests there is, what disks and networks they have.",
        (("dsec vm doctor", "the report"), ("dsec vm doctor -v", "with the details of what is fine")),
        "the DoctorReport record, with the findings and substrates of machines",
        {1: "this machine can make none"},
    ),
    "vm rm": Page("Machines of it run on.", (("dsec vm rm android", "remove it"),), "removed"),
    "screen shot": Page(
        "",
        (
            ("dsec screen shot win now.png", "what it shows now"),
            ("dsec screen shot win screen.png", "to standard output"),
        ),
        "file and bytes",
    ),
    "screen move": Page("", (("dsec screen move win 100 200", "point there"),), "width and height of the screen"),
    "screen click": Page(
        "",
        (
            ("dsec screen click win 100 200", "with the left button"),
            ("dsec screen click win 100 200 --button right", "a menu, most often"),
        ),
        "width and height of the screen",
    ),
    "screen drag": Page(
        "", (("dsec screen drag win 10 10 300 300", "select, or move"),), "width and height of the screen"
    ),
    "screen scroll": Page(
        "",
        (("dsec screen scroll win 3", "down"), ("dsec screen scroll win -- -3", "up")),
        "width and height of the screen",
    ),
    "screen type": Page(
        "",
        (("dsec screen type win 'echo hello' --enter", "a command in a terminal"),),
        "width and height of the screen",
    ),
    "screen key": Page(
        "",
        (
            ("dsec screen key win enter", "one key"),
            ("dsec screen key win ctrl+l f5", "two, one after the other"),
        ),
        "width and height of the screen",
    ),
}
