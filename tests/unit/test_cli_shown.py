"""What the commands show of records, and what they say of options that do not fit."""

from __future__ import annotations

import pytest
import typer

from dsec.cli.layers import _used_by
from dsec.cli.sources import SourceOptions
from dsec.wire.layers import LayerInfo


def test_who_has_a_layer_is_shown_by_digests_that_people_can_read() -> None:
    record = "task-1@" + "5bd1fa820737" + "8a2e" * 13
    layer = LayerInfo(
        digest="9a" * 32, kind="erofs", size_bytes=1, entries=1, created_at=0.0, environments=("tools:1.4", record)
    )

    assert _used_by(layer) == "tools:1.4, task-1@5bd1fa820737"


def test_a_repository_without_a_commit_is_wrong_usage() -> None:
    with pytest.raises(typer.BadParameter, match="URL@COMMIT"):
        SourceOptions(owner="keep", git="https://host/repo.git").source("repo")
