"""Ranks of MPI save together: `examples/mpi/job.py`, as `mpiexec` starts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import holdfast

_JOB = Path(__file__).parents[4] / "examples" / "mpi" / "job.py"


def test_ranks_of_mpi_save_and_continue_at_another_number(tmp_path: Path) -> None:
    if find_spec("mpi4py") is None:  # in no extra: Lightning starts MPI wherever it finds mpi4py
        pytest.skip("not installed: pip install mpi4py mpich")
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec is None:
        pytest.skip("mpiexec is not installed: pip install mpich")
    for ranks in (2, 3):
        done = subprocess.run(
            [mpiexec, "-n", str(ranks), sys.executable, str(_JOB), str(tmp_path / "reg")],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("mpi/main/step") == ranks
    with holdfast.open(tmp_path / "reg") as reg:
        found = reg.run("mpi").checkpoints()
        assert [one.step for one in found] == [1, 2]
        assert [len(one.load()["noise"]) for one in found] == [2, 3]
        assert (found[1].load()["weights"] == 3).all()
        assert not reg.verify(deep=True).findings
