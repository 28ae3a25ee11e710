"""What is told of the process that begins a run, and who of many may save."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.registry.errors import Conflict
from holdfast.registry.values import environment
from holdfast.registry.values.environment import describe_environment
from holdfast.registry.values.process import require_first_rank


def _repository(folder) -> None:
    for arguments in (
        ["init", "-q"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *arguments], cwd=folder, check=True)


def test_versions_and_host_are_told(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    found = describe_environment()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["slurm_job"] == "4711"
    assert found["host"]
    assert all(isinstance(value, str) and value for value in found.values())


def test_what_is_unknown_is_left_out(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = describe_environment()
    assert not {"slurm_job", "git_commit"} & found.keys()


def test_the_commit_is_told_and_whether_the_tree_was_changed(monkeypatch, tmp_path):
    _repository(tmp_path)
    monkeypatch.chdir(tmp_path)
    clean = describe_environment()["git_commit"]
    assert len(clean) == 40
    (tmp_path / "more.txt").write_text("x")
    assert describe_environment()["git_commit"] == f"{clean}+dirty"


def test_a_machine_without_git_begins_runs_as_well(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git_commit" not in describe_environment()


def test_torch_is_told_only_where_it_is_loaded(monkeypatch):
    monkeypatch.setattr(environment, "_git", lambda *arguments: "")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "torch" not in describe_environment()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "8"},
        {"RANK": "3", "WORLD_SIZE": "1"},
        {"RANK": "3"},
        {"WORLD_SIZE": "8"},
        {"RANK": "", "WORLD_SIZE": ""},
    ],
)
def test_the_first_rank_may_save(monkeypatch, env):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    require_first_rank()


def test_any_other_rank_is_told_what_to_do(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(Conflict, match=r"RANK=3: only rank 0 may save.*if rank == 0"):
        require_first_rank()
