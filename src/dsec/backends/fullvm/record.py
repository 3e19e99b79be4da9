"""What the journal keeps of a full machine."""

from __future__ import annotations

from dsec.backends.vm.record import MachineRecord
from dsec.core.machines import Agent


class FullvmRecord(MachineRecord, frozen=True, kw_only=True):
    agent: Agent
