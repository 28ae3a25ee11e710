"""The Python of pages that show parts of a program: it runs with what the reader has around it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast
from tests.support.pages import PAGES, ROOT, Block, blocks, readers_own, run_python

_DOCS = ROOT / "docs"


def _fragments(name: str) -> list[Block]:
    return [block for block in blocks(_DOCS / name) if block.language == "python"]


@pytest.fixture
def reg(newcomer: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[holdfast.Registry]:
    monkeypatch.setenv("HOLDFAST_REGISTRY", "checkpoints")
    with holdfast.init("checkpoints") as made:
        yield made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_python_of_a_page_can_be_parsed(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, f"{page}, line {block.line}", "exec")


def test_resuming(reg: holdfast.Registry) -> None:
    restoring, stale, verifying = _fragments("resume.md")
    page = _DOCS / "resume.md"
    augment, loader = random.Random(3), _Loader()
    names: dict[str, Any] = {
        **readers_own(),
        "holdfast": holdfast,
        "scheduler": {"last": 7},
        "batches": holdfast.rng.Batches(loader, {"augment": augment}),
        "run": reg.create_run("digits"),
    }
    run_python(page, restoring, names)
    assert names["restored"] is None
    names["run"].save({**names["state"], "bandit": {"arms": {"wiki": 1, "web": 2}}}, step=1)
    names["run"].streams["state"].append([{"step": 1, "arms": {"books": 1}}])
    drawn = augment.random()
    loader.position = 9
    run_python(page, restoring, names | {"run": reg.run("digits")})
    assert (augment.random(), loader.position) == (drawn, 4)
    run_python(page, stale, names)
    assert [str(one) for one in names["restored"].stale] != []
    run_python(page, verifying, {"holdfast": holdfast, "train": _train})


class _Loader:
    """A loader with a position."""

    def __init__(self) -> None:
        self.position = 4

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _train(registry: holdfast.Registry, stop: int) -> None:
    run = registry.run("digits", create=True)
    restored = run.restore()
    total = restored.state["total"] if restored else 0
    for step in range(restored.checkpoint.step if restored else 0, stop):
        total += step
    run.save({"total": total}, step=stop)


def test_the_journal(reg: holdfast.Registry, tmp_path: Path) -> None:
    (block,) = _fragments("journal.md")
    text = block.text.replace("/nvme/holdfast", str(tmp_path / "nvme"))
    text = text.replace("s3://my-bucket/team", reg.url)
    names = {"holdfast": holdfast, "state": {"model": {"weight": bytes(1000)}}}
    run_python(_DOCS / "journal.md", Block("", "python", text, block.line), names)
    assert names["ck"].durable_in == "registry"
    names["reg"].close()


def test_the_training_loop(reg: holdfast.Registry) -> None:
    """Its first block has a test of its own, beside the checkpointer's."""
    _, notice, ranks, logging, picture, sample = _fragments("training.md")
    page = _DOCS / "training.md"
    answer = SimpleNamespace(status_code=200)
    names: dict[str, Any] = {"run": reg.create_run("digits"), "METADATA_URL": "http://unasked"}
    names["holdfast"] = holdfast
    names["requests"] = SimpleNamespace(get=lambda url, timeout: answer)
    run_python(page, notice, names)
    with pytest.raises(SystemExit, match="143"), names["checkpointer"] as checkpointer:
        for step in range(1, 10):
            checkpointer.step(step, {"model": step})
    world = SimpleNamespace(Get_rank=lambda: 0, allreduce=lambda value, op: value)
    names = {"run": reg.create_run("ranks"), "comm": world, "MPI": SimpleNamespace(MAX=max)}
    names["holdfast"] = holdfast
    run_python(page, ranks, names)
    with names["checkpointer"] as checkpointer:
        checkpointer.step(1, {"model": 1})
    assert names["run"].latest().step == 1
    run_python(page, logging, names | {"loss": 0.5, "rate": 0.1, "step": 2})
    pixels = np.zeros((2, 3))
    run_python(page, picture, names | {"loss": 0.4, "pixels": pixels, "step": 3})
    png = b"\x89PNG\r\n\x1a\n"
    run_python(page, sample, names | {"png": png, "step": 2})
    assert names["run"].streams["samples"].read()[0]["picture"] == png
    names["run"].close()
    logged = [{"loss": 0.5, "lr": 0.1, "step": 2}, {"loss": 0.4, "step": 3}]
    assert names["run"].streams["log"].read() == logged
    assert set(names["run"].streams["log-samples"].read()[0]) == {"step", "digit", "said"}
