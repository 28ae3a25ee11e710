"""Describe where a run begins: git commit, versions, device, host. Information only."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from holdfast.registry.values.process import host_name


def describe_environment() -> dict[str, str]:
    """Describe this process, without importing anything heavy."""
    found = {
        "host": host_name(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "holdfast": _version("holdfast"),
        "torch": _version("torch") if "torch" in sys.modules else "",
        "device": _device(),
        "git_commit": _git("rev-parse", "HEAD"),
        "slurm_job": os.environ.get("SLURM_JOB_ID", ""),
    }
    if found["git_commit"] and _git("status", "--porcelain"):
        found["git_commit"] += "+dirty"
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


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
