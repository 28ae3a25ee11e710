"""The blocks of a page of the documents, and how a reader runs them.

Python blocks of a page share one namespace, where `model`, `optimizer` and `train_step` are the
reader's. sh blocks run in the same folder, and what they export holds for the blocks below: a block
of plain `holdfast` commands runs in this process, which is faster; any other one in bash, with the
command on the PATH. `<!-- not run: why -->` above a block keeps it from running. A text block is
what the Python block above it prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import invoke

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
#: Every page that people read.
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "terraform" / "README.md",
]
BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)
_EXPORT = re.compile(r"^export ((?:\w+=\S+ ?)+)", re.M)
_PLAIN = re.compile(r"(?:(?:export \w+=[^\s$~]+|holdfast [^\n|&;<>$\\]*)?(?: *#[^\n]*)?\n)+")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment above it."""

    mark: str
    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1] or "", found[2], found[3], text.count("\n", 0, found.start(3)) + 1)
        for found in BLOCK.finditer(text)
    ]


def readers_own() -> dict[str, Any]:
    """Return a model, its optimizer and a step of training: the reader's own."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(step: int) -> float:
        loss = (model(torch.full((4, 64), step / 300.0)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return {"model": model, "optimizer": optimizer, "train_step": train_step}


def run_python(page: Path, block: Block, names: dict[str, Any]) -> str:
    """Run a block, and return what it prints. Line numbers of a traceback are those of the page."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def run_sh(page: Path, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a block, and keep what it exports."""
    for line in _EXPORT.findall(block.text):
        for word in line.split():
            name, _, value = word.partition("=")
            monkeypatch.setenv(name, os.path.expandvars(value))
    status, output = _in_process(block) if _PLAIN.fullmatch(block.text) else _in_bash(block)
    where = f"{page.relative_to(ROOT)}, line {block.line}"
    assert status == 0, f"{where}:\n{block.text}\n{output}"


def _in_process(block: Block) -> tuple[int, str]:
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["holdfast"]:
            done = invoke(*words[1:])
            if done.exit_code != 0:
                return done.exit_code, done.output
    return 0, ""


def _in_bash(block: Block) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def run_page(page: Path, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Run the blocks of a page in order; return how many ran, by language."""
    printed, ran = "", Counter[str]()
    for block in blocks(page):
        if block.mark.startswith("not run: ") or block.language == "json":
            continue
        if block.language == "python":
            printed = run_python(page, block, names)
        elif block.language == "sh":
            run_sh(page, block, monkeypatch)
        else:
            expected = block.text.splitlines()
            assert printed.splitlines() == expected, f"{page.name}, line {block.line}"
        ran[block.language] += 1
    return ran
