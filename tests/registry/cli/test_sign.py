"""`sign`, `verify --signed`, and commands whose commits `HOLDFAST_SIGN` signs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from tests.support.commands import invoke
from tests.support.keys import write_key


def test_runs_are_signed_and_a_reader_is_told_by_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, registry = write_key(tmp_path, "ana"), tmp_path / "reg"
    monkeypatch.setenv("HOLDFAST_REGISTRY", str(registry))
    with holdfast.init(registry, skip_race_probe=True) as reg:
        for name in ("a", "b"):
            reg.create_run(name).save({"w": np.arange(3.0)}, step=1)
    assert invoke("sign", "b", "--key", key).output == "b: 2 commits signed\n"
    assert invoke("sign", "--key", key).output == (
        "a: 2 commits signed\nb: 2 commits signed before\n"
    )
    assert json.loads(invoke("sign", "b", "--key", key, "--json").output) == [
        {"run": "b", "commits": 2, "new": False}
    ]
    # The commits of every command are signed by the key that the environment names.
    monkeypatch.setenv("HOLDFAST_SIGN", key)
    np.savez(tmp_path / "state.npz", w=np.ones(3))
    assert invoke("push", tmp_path / "state.npz", "a", "--step", "2").exit_code == 0
    assert invoke("tag", "set", "a/latest", "keeper").exit_code == 0
    trusted = tmp_path / "trusted-ana"
    done = invoke("verify", "--signed", trusted)
    id_ = next(iter((registry / "signatures" / "a").iterdir())).name.partition(".")[2][:12]
    assert (done.exit_code, done.output.splitlines()[:2]) == (
        0,
        [
            f"a: ana ({id_}) vouches for 4 of 4 commits",
            f"b: ana ({id_}) vouches for 2 of 2 commits",
        ],
    )
    monkeypatch.setenv("HOLDFAST_SIGN", "")
    assert invoke("tag", "set", "b/latest", "keeper").exit_code == 0
    done = invoke("verify", "--signed", trusted)
    assert done.exit_code == 6
    assert done.output.splitlines()[:3] == [
        "error: b: commit 2 is not signed by a trusted key",
        "  affects b",
        "  If they are right: `holdfast sign b --key KEY`.",
    ]
    said = json.loads(invoke("verify", "--signed", trusted, "--json").output)["vouched"][1]
    assert said["key"].startswith(f"sha256:{id_}")
    assert {**said, "key": ""} == {"run": "b", "name": "ana", "key": "", "commits": 2, "of": 3}
    done = invoke("sign", "--key", tmp_path / "none")
    assert done.exit_code == 3
    assert done.output.startswith(f"error: {tmp_path / 'none'}: the key cannot be read; ")
