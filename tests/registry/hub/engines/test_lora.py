"""LoRA adapters by name, with a stub of vLLM: two files in a folder, or nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.errors import IncompatibleState, InvalidInput
from holdfast.registry.hub.engines import folder, lora
from tests.registry.hub.engines.conftest import Follow, until
from tests.registry.hub.engines.fakes import hash_of, tensors_hash
from tests.support.faults import flip
from tests.support.source import ROOT

BASE = "lab/base-7b"
FILES = ["adapter_config.json", "adapter_model.safetensors"]


@dataclass
class LoRARequest:
    """The fields of vLLM's, and what it refuses."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        assert self.lora_int_id > 0
        assert self.lora_path


class LoRAResolver(ABC):
    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None: ...


@dataclass
class Engine:
    """A process of vLLM: it asks the resolvers for a name once, then knows it for ever."""

    resolvers: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, LoRARequest] = field(default_factory=dict)

    def register_resolver(self, name: str, resolver: Any) -> None:
        assert isinstance(resolver, LoRAResolver)
        self.resolvers[name] = resolver

    def ask(self, *names: str, base: str = BASE) -> list[Path | None]:
        """Ask for adapters at the same time; return their folders."""

        async def ask_all() -> list[LoRARequest | None]:
            (resolver,) = self.resolvers.values()
            return await asyncio.gather(*(resolver.resolve_lora(base, one) for one in names))

        found = asyncio.run(ask_all())
        self.requests |= {one.lora_name: one for one in found if one is not None}
        assert all(name == one.lora_name for name, one in zip(names, found, strict=True) if one)
        return [one and Path(one.lora_path) for one in found]

    def end(self) -> None:
        """Close what the process has open."""
        for one in self.folders._held.values():
            os.close(one)
        self.folders._held.clear()

    @property
    def folders(self) -> Any:
        cells = self.resolvers["Holdfast"].resolve_lora.__closure__
        (found,) = (one for one in (c.cell_contents for c in cells) if hasattr(one, "find"))
        return found


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a process of vLLM with the plug-in."""
    monkeypatch.setenv("HOLDFAST_REGISTRY", str(tmp_path / "reg"))
    monkeypatch.setenv("HOLDFAST_LORA_FOLDER", str(tmp_path / "adapters"))
    started: list[Engine] = []

    def made(runs: str = "style-*,tuned", **given: object) -> Engine:
        monkeypatch.setenv("HOLDFAST_LORA_RUNS", runs)
        for name in ("BASES", "BYTES", "PER_MINUTE"):
            monkeypatch.setenv(f"HOLDFAST_LORA_{name}", str(given.get(name, "")))
        started.append(Engine())
        modules: dict[str, dict[str, Any]] = {
            "vllm": {},
            "vllm.lora": {},
            "vllm.lora.request": {"LoRARequest": LoRARequest},
            "vllm.lora.resolver": {
                "LoRAResolver": LoRAResolver,
                "LoRAResolverRegistry": started[-1],
            },
        }
        for name, members in modules.items():
            module = ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)
        lora.register_lora()
        return started[-1]

    yield made
    for one in started:
        if one.resolvers:
            one.end()


def adapter(seed: int, base: object = BASE, kind: str = "LORA") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    weights = {f"layers.0.q_proj.lora_{a}.weight": rng.random((4, 64), np.float32) for a in "AB"}
    config = {"peft_type": kind, "base_model_name_or_path": base, "r": 4}
    return {"adapter": weights, "configs": {"adapter_config.json": config}, "step": seed}


@pytest.fixture
def reg(tmp_path: Path) -> Iterator[holdfast.Registry]:
    """The registry: five runs with one adapter each, and a model."""
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as made:
        for seed, name in enumerate(("tuned", "style-a", "style-b", "style-c", "secret")):
            made.create_run(name).save(adapter(seed), step=1)
        made.create_run("style-model").save({"model": {"w": np.zeros(9, np.float32)}}, step=1)
        yield made


def seed_of(folder: Path | None) -> int:
    """Return the seed of the adapter in a folder of exactly two files, byte by byte."""
    assert folder is not None
    assert sorted(one.name for one in folder.iterdir()) == FILES
    return [hash_at(seed) for seed in range(9)].index(hash_of(str(folder)))


def hash_at(seed: int) -> str:
    return tensors_hash({name: one.tobytes() for name, one in adapter(seed)["adapter"].items()})


def test_a_name_becomes_a_folder_of_two_files_which_other_processes_share(
    reg: holdfast.Registry, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = reg.run("tuned")
    run.releases.publish("1.0.0", run.latest(), only=["adapter"])
    first = start()
    whole, latest, released = first.ask("tuned", "tuned/latest", "tuned/releases/1.0.0")
    assert seed_of(whole) == seed_of(released) == 0
    assert whole == latest
    assert whole.is_absolute()
    reg.create_run("Tuned").save(adapter(6), step=1)  # also where the disk ignores case
    assert seed_of(*start("Tuned").ask("Tuned")) == 6
    run.save(adapter(5), step=2)
    newest, by_step = first.ask("tuned/main/step2", "tuned/main/step1")
    assert (seed_of(newest), by_step) == (5, whole)

    second = start()  # another process, or a later one: it writes nothing that is whole
    with monkeypatch.context() as patch:
        patch.setattr(folder, "put_file", None)
        assert second.ask("tuned/main/step1", "tuned") == [whole, newest]
    data = (newest / FILES[1]).read_bytes()
    for damaged in (data[:-1], data + b"\0", data[:-1] + b"x"):
        (newest / FILES[1]).write_bytes(damaged)
        (mended,) = start().ask("tuned")
        assert mended != newest
        assert seed_of(mended) == 5
        newest = mended
    folders = {one for one in (tmp_path / "adapters").iterdir() if one.name != ".lock"}
    assert folders >= {whole, released, newest}


HOSTILE = [
    *("", ".", "..", "/", "../reg", "/etc/passwd", "tuned/../secret", "tuned/..", "../../tuned"),
    *("tuned\0", "tuned/\0", "tuned\n", "tuned/latest\0", "tuned/\ud800", "TUNED", "style-*"),
    *("~", "C:\\x", "con", "tuned\\latest", "%2e%2e/x", "s3://bucket/x", "style-a/tags/../b"),
    *("x" * 100_000, "style-" + "x" * 100_000, "tuned/" + "x" * 100_000, "[t]uned", "\u202etuned"),
    *("tuned/" + "/" * 400, "tuned/pool/v99", "tuned/artifacts/../x", "tuned/companions/x"),
]


def test_a_hostile_name_finds_nothing_and_writes_nothing(
    reg: holdfast.Registry, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert start().ask(*HOSTILE) == [None] * len(HOSTILE)
    assert sorted(tmp_path.rglob("*")) == before
    assert all(one.getMessage().isprintable() for one in caplog.records)
    assert max(len(one.getMessage()) for one in caplog.records) < 2000


def test_a_run_that_is_not_allowed_is_answered_like_one_that_is_absent(
    reg: holdfast.Registry,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = start()
    with monkeypatch.context() as patch:
        patch.setattr(lora, "open_registry", None)  # the store is not even asked
        assert engine.ask("secret", "secret/latest", "no-such-run") == [None] * 3
    assert caplog.text == ""
    assert start("*").ask("no-such-run") == [None]
    assert "no such run" in caplog.text


def test_only_adapters_of_the_served_model_are_given(
    reg: holdfast.Registry, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    for name, *given in (
        ("style-other", 1, "lab/base-13b"),
        ("style-kind", 1, BASE, "IA3"),
        ("style-path", 1, "/models/7b"),
        ("style-list", 1, [BASE]),
    ):
        reg.create_run(name).save(adapter(*given), step=1)
    odd = {**adapter(1), "configs": {"adapter_config.json": [BASE]}}
    reg.create_run("style-odd").save(odd, step=1)
    names = ["style-other", "style-kind", "style-path", "style-list", "style-odd", "style-model"]
    engine = start()
    assert engine.ask(*names) == [None] * 6
    assert caplog.text.count("not a LoRA adapter of the model that is served") == 6
    assert "'LORA' of 'lab/base-13b'" in caplog.text
    assert engine.ask("style-a", base="lab/base-13b") == [None]
    assert [seed_of(one) for one in start(BASES="/models/7b,x").ask("style-path", "style-a")] == [
        1,
        1,
    ]


def test_names_are_read_at_a_bounded_rate(
    reg: holdfast.Registry, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(lora, "time", SimpleNamespace(monotonic=lambda: now_s))
    engine = start(PER_MINUTE=3)
    engine.ask(*["secret"] * 9)  # cost nothing, since nothing is read
    found = engine.ask("style-a", "style-b/best", "tuned", "style-c")
    assert [one is None for one in found] == [False, True, False, True]
    now_s = 59.9
    assert engine.ask("style-c") == [None]
    now_s = 60.0
    assert [seed_of(one) for one in engine.ask("style-c", "style-b", "style-a")] == [3, 2, 1]


def test_the_disk_is_bounded_and_no_engine_loses_a_folder(
    reg: holdfast.Registry, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """What an engine was told of stays: it reads it again when its own memory is full."""
    first = start()
    a, b = first.ask("style-a", "style-b")
    size = sum(file.stat().st_size for file in a.iterdir())
    second = start(BYTES=2 * size + 100)
    assert second.ask("tuned") == [None]
    assert "no room for one more adapter" in caplog.text
    assert (seed_of(a), seed_of(b)) == (1, 2)
    assert second.ask("style-b") == [b]
    first.end()
    os.utime(b, (5, 5))  # older than the other, and of a process that lives
    (c,) = second.ask("style-c")
    assert (a.exists(), seed_of(b), seed_of(c)) == (False, 2, 3)
    second.end()
    third = start(BYTES=2 * size + 100)
    os.utime(c, (9, 9))
    (d,) = third.ask("tuned")  # in place of the one that was asked for longest ago
    assert (b.exists(), seed_of(c), seed_of(d)) == (False, 3, 0)
    third.end()
    assert start(BYTES=size // 2).ask("style-a") == [None]  # too large: nothing goes for it
    assert (seed_of(c), seed_of(d)) == (3, 0)


def test_damage_and_an_interrupted_write_leave_no_folder(
    reg: holdfast.Registry, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = reg.handle.store.backend
    before = {info.key for info in backend.list("packs/")}
    reg.create_run("style-d").save(adapter(7), step=1)
    (key,) = {info.key for info in backend.list("packs/")} - before
    flip(backend, key)
    engine = start()
    assert engine.ask("style-d") == [None]
    assert "no LoRA style-d" in caplog.text
    (seen,) = engine.ask("style-a")
    assert {one.name for one in (tmp_path / "adapters").iterdir()} == {".lock", seen.name}


def test_the_plug_in_is_found_and_does_nothing_unless_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (named,) = project["entry-points"]["vllm.general_plugins"].values()
    register = EntryPoint("", named, "").load()
    monkeypatch.delenv("HOLDFAST_LORA_RUNS", raising=False)
    register()  # without vLLM, which is not installed here
    for wrong in ({"BYTES": 0}, {"BYTES": "1e9"}, {"PER_MINUTE": -1}):
        with pytest.raises(InvalidInput, match="HOLDFAST_LORA_"):
            start(**wrong)
    monkeypatch.setenv("HOLDFAST_LORA_FOLDER", "")
    with pytest.raises(InvalidInput, match="a folder"):
        start()


def test_a_follower_keeps_an_adapter_as_a_folder_and_never_as_the_model(
    run: Any, follow: Follow
) -> None:
    """For SGLang: `--lora-paths NAME=DIR/current`."""
    run.save(adapter(1), step=1)
    told: list[Any] = []
    follower = follow([], notify=told.append, urls=[])
    made = follower.poll()
    assert made is not None
    assert set(FILES) < {one.name for one in Path(made.folder).iterdir()}
    assert hash_of(made.folder) == hash_at(1)
    until(lambda: told)
    follower.close()
    served = follow([SimpleNamespace(url="http://127.0.0.1:1")], into=Path(made.folder) / "other")
    with pytest.raises(IncompatibleState, match="an adapter is no model"):
        served.poll()
