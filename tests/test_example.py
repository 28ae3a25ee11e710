"""The demonstration keeps its word: `examples/digits/main.py` run whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

_MAIN = Path(__file__).parents[1] / "examples" / "digits" / "main.py"


def test_the_main_job_where_one_was_broken_off_before(tmp_path: Path) -> None:
    for module in ("torch", "sklearn", "moto", "boto3"):
        pytest.importorskip(module)
    with holdfast.init(tmp_path / "demo" / "registry") as reg:
        reg.create_run("demo1-killed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(_MAIN), "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "FAIL" not in done.stdout
    assert "every claim held" in done.stdout
    with holdfast.open(tmp_path / "demo" / "registry", read_only=True) as reg:
        branch = "demo2-killed-branch"
        assert reg.run_names() == ["demo1-killed", "demo2-killed", branch, "demo2-straight"]
        assert (
            reg.checkpoint(branch).digest == reg.checkpoint("demo2-killed/gates/plain_best").digest
        )
        assert list(reg.stored("demo2-killed/releases/latest").components) == ["model"]
        killed, straight = (reg.checkpoint(f"demo2-{name}") for name in ("killed", "straight"))
        assert killed.digest == straight.digest
