"""Environments of a state directory, without a node: for set-up, and for looking into what a node has.

python -m dsec.image build NAME (--debian PACKAGE… | --directory PATH | --tar PATH | --oci PATH) --state DIR
python -m dsec.image list | remove NAME | doctor --state DIR
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from dsec.core.errors import DsecError
from dsec.core.units import format_size
from dsec.image.build import build
from dsec.image.environments import EnvironmentStore
from dsec.image.recipes import BASE_NAME, BASE_PACKAGES
from dsec.wire import codec
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    BuildSource,
    DebianSource,
    DirectorySource,
    OciSource,
    Ownership,
    TarSource,
)


def main() -> int:
    arguments = _parser().parse_args()
    try:
        return _run(arguments)
    except DsecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    store = EnvironmentStore(arguments.state)
    store.layers.clean()
    if arguments.command == "build":
        request = BuildRequest(
            name=arguments.name, source=_source(arguments), replace=arguments.replace, refresh=arguments.refresh
        )
        info = asyncio.run(build(store, request, _show))
        print(codec.to_json(info).decode())
    elif arguments.command == "list":
        for info in store.list():
            print(f"{info.name}\t{format_size(info.size_bytes)}\t{info.kind}\t{info.source}")
    elif arguments.command == "remove":
        store.remove(arguments.name)
    else:
        facts = store.describe()
        print(f"new layers are kept as: {facts.kind}{f', because {facts.reason}' if facts.reason else ''}")
        print(f"{facts.environments} environments, {facts.layers} layers, {format_size(facts.layer_bytes)}")
        print(f"{format_size(facts.free_bytes)} free at {facts.state}")
    return 0


def _show(event: BuildEvent) -> None:
    print(f"[{event.stage}] {event.message}" if event.stage else f"  {event.message}", file=sys.stderr)


def _source(arguments: argparse.Namespace) -> BuildSource:
    owner = Ownership(arguments.owner)
    if arguments.directory:
        return DirectorySource(str(Path(arguments.directory).absolute()), owner)
    if arguments.tar:
        return TarSource(str(Path(arguments.tar).absolute()), owner)
    if arguments.oci:
        return OciSource(str(Path(arguments.oci).absolute()), arguments.reference, owner)
    packages = tuple(arguments.debian or ()) or (BASE_PACKAGES if arguments.name == BASE_NAME else ())
    return DebianSource(packages, arguments.suite, arguments.variant)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsec.image", description="environments of a state directory")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="make an environment")
    make.add_argument("name")
    make.add_argument(
        "--debian", nargs="*", metavar="PACKAGE", help="Debian packages; none for NAME base: the standard base"
    )
    make.add_argument("--suite", help="Debian suite; default: this machine's")
    make.add_argument("--variant", default="minbase", choices=("minbase", "extract"))
    make.add_argument("--directory", metavar="PATH")
    make.add_argument("--tar", metavar="PATH")
    make.add_argument("--oci", metavar="PATH", help="an OCI image layout directory")
    make.add_argument("--reference", help="which image of the layout")
    make.add_argument("--owner", default="keep", choices=[str(item) for item in Ownership])
    make.add_argument("--replace", action="store_true", help="the name may stand for something else now")
    make.add_argument("--refresh", action="store_true", help="build again, with the packages of today")
    remove = commands.add_parser("remove", help="forget an environment")
    remove.add_argument("name")
    commands.add_parser("list", help="what there is")
    commands.add_parser("doctor", help="how layers are stored here")
    for command in commands.choices.values():
        command.add_argument("--state", required=True, help="state directory of the node")
    return parser


if __name__ == "__main__":
    sys.exit(main())
