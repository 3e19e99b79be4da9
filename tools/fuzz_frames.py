"""Fuzzes what the node does with bytes of an agent; needs atheris. Takes a corpus and -max_total_time=60.

Any exception but ProtocolError is a find.
"""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports():
    from dsec.core.errors import ProtocolError
    from dsec.wire import agent
    from dsec.wire.codec import unpack
    from dsec.wire.frames import Frame, FrameDecoder, FrameType, decode_data

_BODIES = {
    FrameType.HELLO: [agent.HelloReply],
    FrameType.RES: [agent.ExecStarted, agent.ExecList, agent.FileStat, agent.ListReply, agent.UsageReply],
    FrameType.ERR: [agent.AgentError],
    FrameType.CREDIT: [agent.Credit],
    FrameType.END: [agent.ExecEnded, agent.Written],
    FrameType.EVENT: [agent.WatchEvent],
}


def take_input(data: bytes) -> None:
    decoder = FrameDecoder()
    with contextlib.suppress(ProtocolError):
        for start in range(0, len(data), 7):
            for frame in decoder.feed(data[start : start + 7]):
                take_frame(frame)


def take_frame(frame: Frame) -> None:
    with contextlib.suppress(ProtocolError):
        if frame.type == FrameType.DATA:
            decode_data(frame.body)
    for kind in _BODIES.get(FrameType(frame.type), []):
        with contextlib.suppress(ProtocolError):
            unpack(frame.body, kind)


def main() -> None:
    atheris.Setup(sys.argv, take_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
