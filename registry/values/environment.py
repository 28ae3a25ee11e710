"""Describe where a run begins: git commit, versions, device, host. Information only."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from holdfast.registry.values.process import host_name

_CONFIG: Final = "[core]\nrepositoryFormatVersion = 1\n[extensions]\nobjectFormat = {}\n"
_STATUS: Final = (
    "status",
    "--porcelain=v2",
    "--branch",
    "--ignore-submodules=all",
    "--no-ahead-behind",
)
_SAFE: Final = os.O_NONBLOCK | os.O_NOFOLLOW
_GIT: Final = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
}


def describe_environment() -> dict[str, str]:
    """Describe this process, without importing anything heavy."""
    found = {
        "host": host_name(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "holdfast": _version("holdfast-registry"),
        "torch": _version("torch") if "torch" in sys.modules else "",
        "device": _device(),
        "git_commit": _git_commit(),
        "slurm_job": os.environ.get("SLURM_JOB_ID", ""),
    }
    # Names from the system may hold bytes that are not valid text.
    return {key: value.encode(errors="replace").decode() for key, value in found.items() if value}


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _device() -> str:
    torch = sys.modules.get("torch")
    # Asking for the device's name starts CUDA, so only ask where it runs already.
    if torch is not None and torch.cuda.is_initialized():
        return str(torch.cuda.get_device_name())
    return platform.machine()


def _git_commit() -> str:
    """Return the commit of the current folder, with `+dirty` if files differ from it.

    Git runs programs that the configuration of a folder names. So it gets a configuration of ours,
    beside which the index, the objects and the refs of the folder are.
    """
    places = os.environ.get("PATH", "").split(os.pathsep)
    program = shutil.which("git", path=os.pathsep.join(one for one in places if one[:1] == "/"))
    try:
        here = Path.cwd()
        top = next((one for one in (here, *here.parents) if os.path.lexists(one / ".git")), here)
        folder = _git_folder(top)
        with tempfile.TemporaryDirectory() as made:
            shared = folder / (_text(folder / "commondir") or ".")
            Path(made, "index").symlink_to(folder / "index")
            for name in ("info", "objects", "packed-refs", "refs"):
                Path(made, name).symlink_to(shared / name)
            Path(made, "HEAD").write_text(_text(folder / "HEAD") + "\n")
            kind = "sha256" if "sha256" in _text(shared / "config") else "sha1"
            Path(made, "config").write_text(_CONFIG.format(kind))
            env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
            env |= {**_GIT, "GIT_DIR": made, "GIT_WORK_TREE": str(top)}
            command = [program or "/git", *_STATUS]
            told = subprocess.run(command, capture_output=True, timeout=5, check=True, env=env)
        oid, _, *lines = told.stdout.decode(errors="replace").splitlines()
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    commit = oid.removeprefix("# branch.oid ").replace("(initial)", "")
    return f"{commit}+dirty" if commit and lines else commit


def _git_folder(top: Path) -> Path:
    """Return the `.git` of the user; a file, as of a worktree, leads only to what knows it."""
    found = named = top / ".git"
    if found.is_file():
        named = (top / _text(found).removeprefix("gitdir: ")).resolve()
        is_submodule = any(named.is_relative_to(one / ".git") for one in top.parents)
        if not is_submodule and _text(named / "gitdir") != str(found):
            raise FileNotFoundError(named)
    if {found.lstat().st_uid, named.lstat().st_uid} != {os.geteuid()} or found.is_symlink():
        raise PermissionError(found)
    return named


def _text(path: Path) -> str:
    """Return a short text that a `.git` holds; nothing if it is no file."""
    try:
        with open(path, opener=lambda name, flags: os.open(name, flags | _SAFE)) as file:
            return file.read(4096).strip()
    except (OSError, ValueError):
        return ""
