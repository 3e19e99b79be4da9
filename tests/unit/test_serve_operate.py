"""`dsec cluster` used wrongly says what was wrong, and waits for nobody."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dsec.core.errors import InvalidArgumentError
from dsec.serve.authority import AuthorityDirectory
from dsec.serve.operate import run_operation


def test_asking_without_a_server_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSEC_JOIN", raising=False)
    AuthorityDirectory.create(tmp_path / "keys", "main").issue_api(tmp_path / "identity", "api-1", days=1)
    config = tmp_path / "dsec.toml"
    config.write_text(f'[cluster]\nidentity = "{tmp_path}/identity"\n')
    options = argparse.Namespace(operation="nodes", names=[], config=config, json=False)

    with pytest.raises(InvalidArgumentError, match="no NATS server is named"):
        run_operation(options, {})


def test_an_identity_of_an_unknown_kind_is_named() -> None:
    options = argparse.Namespace(operation="issue", names=["nodes", "worker-1"], authority=None)

    with pytest.raises(InvalidArgumentError, match="no identity of 'nodes'"):
        run_operation(options, {})
