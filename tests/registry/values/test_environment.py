"""What is told of the process that begins a run, and who of many may save."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.registry.errors import Conflict
from holdfast.registry.values import environment
from holdfast.registry.values.environment import describe_environment
from holdfast.registry.values.process import require_first_rank


def _git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "advice.addEmbeddedRepo=false")
    command = ["git", *who, *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def _repository(folder: Path) -> None:
    _git(folder, "init", "-q")
    _git(folder, "commit", "-q", "--allow-empty", "-m", "x")


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


def _attacks(folder: Path, program: Path) -> dict[str, Path]:
    """Make folders whose `.git` starts a program when git looks at them; return them by name."""
    made = {}
    for name in (
        "monitor",
        "filter",
        "hook",
        "differ",
        "include",
        "submodule",
        "buried",
        "pointer",
    ):
        top = made[name] = folder / name
        top.mkdir()
        (top / "weights.txt").write_text("1")
        _git(top, "init", "-q")
        _git(top, "add", ".")
        _git(top, "commit", "-q", "-m", "x")
    _git(made["monitor"], "config", "core.fsmonitor", str(program))
    _git(made["filter"], "config", "filter.x.clean", str(program))
    _git(made["filter"], "config", "filter.x.process", str(program))
    (made["filter"] / ".gitattributes").write_text("* filter=x diff=x")
    (made["filter"] / "weights.txt").write_text("2")
    hooks = folder / "hooks"
    hooks.mkdir()
    (hooks / "post-index-change").symlink_to(program)
    _git(made["hook"], "config", "core.hooksPath", str(hooks))
    os.utime(made["hook"] / "weights.txt", (0, 0))
    for key in ("diff.external", "diff.x.textconv", "core.pager", "core.editor"):
        _git(made["differ"], "config", key, str(program))
    _git(made["include"], "config", "include.path", str(made["monitor"] / ".git/config"))
    inner = made["submodule"] / "inner"
    shutil.copytree(made["monitor"], inner)
    _git(inner, "config", "--unset", "core.fsmonitor")
    _git(made["submodule"], "add", "inner")
    _git(inner, "config", "core.fsmonitor", str(program))
    bare = made["buried"] / ".git"
    _git(made["buried"], "config", "core.worktree", str(made["buried"]))
    _git(made["buried"], "config", "core.fsmonitor", str(program))
    for part in ("HEAD", "config", "index", "objects", "refs"):
        (bare / part).rename(made["buried"] / part)
    shutil.rmtree(bare)
    shutil.rmtree(made["pointer"] / ".git")
    (made["pointer"] / ".git").write_text(f"gitdir: {made['monitor']}/.git\n")
    made["path"] = made["monitor"]
    (made["path"] / "git").symlink_to(program)
    return made


def test_no_folder_names_a_program_that_runs(monkeypatch, tmp_path):
    program, ran = tmp_path / "program", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\npwd >> {ran}\n")
    program.chmod(0o755)
    told, started = {}, {}
    for name, folder in _attacks(tmp_path, program).items():
        monkeypatch.chdir(folder)
        if name == "path":
            monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
        told[name] = describe_environment().get("git_commit", "")
        if ran.exists():
            started[name] = ran.read_text()
            ran.unlink()
    assert started == {}
    of_folders = {name for name, commit in told.items() if commit}
    # A buried repository is no repository, and a pointer counts where it is pointed back to.
    assert of_folders == told.keys() - {"buried", "pointer"}


def test_worktrees_submodules_and_packed_refs_are_told(monkeypatch, tmp_path):
    main, tree = tmp_path / "main", tmp_path / "tree"
    main.mkdir()
    _repository(main)
    _git(main, "worktree", "add", "-q", str(tree))
    _git(main, "pack-refs", "--all")
    (main / ".git/modules").mkdir()
    _git(main, "init", "-q", "sub", "--separate-git-dir", str(main / ".git/modules/sub"))
    for folder in (main, tree, main / "sub"):
        if folder.name == "sub":
            _git(folder, "commit", "-q", "--allow-empty", "-m", "y")
        monkeypatch.chdir(folder)
        commit = describe_environment()["git_commit"]
        assert commit.removesuffix("+dirty") == _git(folder, "rev-parse", "HEAD")
    monkeypatch.chdir(tree)
    (tree / "ignored").write_text("x")
    (main / ".git/info/exclude").write_text("ignored\n")
    assert "dirty" not in describe_environment()["git_commit"]
    (tree / "staged").write_text("x")
    _git(tree, "add", "staged")
    assert describe_environment()["git_commit"].endswith("+dirty")


@pytest.mark.parametrize(
    "head", ["ref: ../../private", "ref: /etc/passwd", "x" * 40, "ref: refs/heads/none", ""]
)
def test_a_head_that_names_no_commit_tells_nothing(monkeypatch, tmp_path, head):
    _repository(tmp_path)
    (tmp_path / "private").write_text("0" * 40)
    (tmp_path / ".git/HEAD").write_text(head)
    monkeypatch.chdir(tmp_path)
    assert "git_commit" not in describe_environment()


def test_a_machine_without_git_begins_runs_as_well(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git_commit" not in describe_environment()


def test_a_git_that_says_nothing_begins_runs_as_well(monkeypatch, tmp_path):
    (tmp_path / "git").write_text("#!/bin/sh\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git_commit" not in describe_environment()


def test_torch_is_told_only_where_it_is_loaded(monkeypatch):
    monkeypatch.setattr(environment, "_git_commit", str)
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
