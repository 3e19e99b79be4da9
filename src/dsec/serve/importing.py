"""`dsec vm import` without a service to ask: into the state directory of a node of a cluster, which has no socket here.

An image appears whole, by a rename, and a node that runs finds it when it is asked for it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsec.backends.fullvm.config import FullvmConfig
from dsec.backends.fullvm.images import MachineImages
from dsec.core.errors import ForbiddenError
from dsec.core.machines import Agent, Bus, Firmware
from dsec.core.units import parse_size
from dsec.node.machinedesk import import_now
from dsec.serve.config import load_config
from dsec.wire.codec import to_json
from dsec.wire.machines import MachineImport


def run_import(options: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    if os.geteuid() != 0:
        raise ForbiddenError("images of a node are root's", hint="run it as root")
    config = load_config(flags, os.environ, file=options.config)
    state = Path(config.state_dir)
    place = FullvmConfig(run_dir=Path(config.run_dir), state_dir=state, **config.full_machines())  # type: ignore[arg-type]
    request = MachineImport(
        name=options.name,
        path=os.path.abspath(options.path),  # noqa: PTH100
        format=options.format,
        firmware=Firmware(options.firmware),
        agent=Agent(options.agent),
        bus=Bus(options.bus),
        boot_wait_s=options.boot_wait,
    )
    reserve = parse_size(config.node.disk_free_bytes_min, "disk_free_bytes_min")
    made = import_now(MachineImages(place.images_dir), request, state, reserve_bytes=reserve)
    sys.stdout.write((to_json(made).decode() if options.json else made.name) + "\n")
    return 0
