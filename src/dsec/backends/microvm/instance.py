"""One running microvm."""

from __future__ import annotations

from dsec.backends.microvm.record import MicrovmRecord
from dsec.backends.vm.instance import MachineInstance


class MicrovmInstance(MachineInstance[MicrovmRecord]):
    pass
