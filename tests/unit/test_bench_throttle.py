"""The store of the burst bench is as narrow as it says, and right."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

from bench.throttle import throttled_store


def test_ranges_come_at_the_rate_of_the_line_and_are_counted(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192
    (tmp_path / "object").write_bytes(content)
    with throttled_store(tmp_path, latency_ms=5, rate=4e6) as store:
        began = time.monotonic()
        with urllib.request.urlopen(f"{store.url}/object", timeout=60) as answer:
            assert answer.read() == content
        assert time.monotonic() - began > len(content) / 4e6 / 2
        request = urllib.request.Request(f"{store.url}/object", headers={"Range": "bytes=10-19"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert (answer.status, answer.read()) == (206, content[10:20])
        assert store.counts() == {"requests": 2, "bytes": len(content) + 10}
