"""`attest --engine`: whose weights an engine has in memory, by the digests that it gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.errors import InvalidInput, RegistryError
from holdfast.registry.face import Registry
from holdfast.registry.hub.engines import attest
from tests.registry.hub.engines.conftest import Start
from tests.registry.hub.engines.fakes import Engine, SGLang
from tests.support.commands import invoke

LAYER = "model.layers.0."


def llama(step: int) -> dict[str, Any]:
    """Return the weights of a Llama of one layer; its two embeddings are tied."""
    rng = np.random.default_rng(step)

    def made(*shape: int) -> Any:
        return rng.random(shape, np.float32).astype(np.float16)

    embedding = made(70, 8)  # engines fill it up to 128 rows
    return {
        "model.embed_tokens.weight": embedding,
        **{f"{LAYER}self_attn.{one}_proj.weight": made(8, 8) for one in "qo"},
        **{f"{LAYER}self_attn.{one}_proj.weight": made(4, 8) for one in "kv"},
        **{f"{LAYER}mlp.{one}_proj.weight": made(12, 8) for one in ("gate", "up")},
        f"{LAYER}mlp.down_proj.weight": made(8, 12),
        f"{LAYER}input_layernorm.weight": np.ones(8, np.float16),
        "model.norm.weight": made(8),
        "lm_head.weight": embedding,
    }


@pytest.fixture(scope="module")
def reg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry whose run `llm` has two steps."""
    with holdfast.init(tmp_path_factory.mktemp("reg") / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("llm")
        for step in (1, 2):
            run.save({"model": llama(step), "step": step}, step=step)
        yield reg


def loaded(start: Start, reg: Registry, kind: str, ranks: int, step: int = 2) -> Engine:
    """Start an engine that was told of a step and has it in memory."""
    engine, stored = start(kind), reg.checkpoint(f"llm/main/step{step}")
    engine.ranks, engine.version = ranks, stored.digest.hex()
    tensors = {name: ([*one.shape], one.tobytes()) for name, one in llama(step).items()}
    del tensors["lm_head.weight"]  # tied
    engine.load(tensors)
    return engine


def kinds(reg: Registry, engine: Engine, ref: str = "llm", **given: Any) -> dict[str, int]:
    """Return how many tensors compare in which way."""
    given = {"key": None, "baseline": None, **given}
    found = attest(reg.stored(ref), engine.url, **given)
    counts = {kind: len(names) for kind, names in found.tensors.items()}
    assert found.is_whole == (not {*counts} - {"equal", "unchanged"})
    return {**counts, **({"extra": len(found.uncompared)} if found.uncompared else {})}


@pytest.mark.parametrize(
    ("kind", "ranks"), [("sglang", 1), ("sglang", 2), ("vllm", 1), ("vllm", 2)]
)
def test_fused_and_cut_tensors_are_found(
    start: Start, reg: Registry, kind: str, ranks: int
) -> None:
    engine = loaded(start, reg, kind, ranks)
    assert kinds(reg, engine) == {"equal": 7 * ranks}
    assert kinds(reg, engine, "llm/main/step1") == {
        "equal": ranks,  # the one that never changes
        "changed or other form": 6 * ranks,
    }
    last = engine.memory[-1]
    name = f"{LAYER}self_attn.qkv_proj.weight"
    last[name] = last[name][:-1] + bytes([last[name][-1] ^ 1])
    (changed,) = attest(reg.stored("llm"), engine.url, None, None).tensors["changed or other form"]
    assert changed.endswith(name)
    assert ("tp" not in changed) or f"tp{ranks - 1}:" in changed
    # The parts of two ranks in each other's place are wrong, too.
    if ranks > 1:
        engine.memory.reverse()
        assert kinds(reg, engine)["changed or other form"] >= 4 * ranks - 1
    for one in engine.memory:
        del one["model.norm.weight"]
        one["rotary.scale"] = b"1234"
    found = kinds(reg, engine)
    assert (found["missing"], found["extra"]) == (1, ranks)


def test_a_missing_tensor_is_named_although_another_has_its_bytes(
    start: Start, reg: Registry
) -> None:
    ones = {"model.norm.weight": np.ones(8, np.float16)}  # as the norm of the layer
    reg.create_run("twins").save({"model": {**llama(2), **ones}}, step=1)
    engine = loaded(start, reg, "vllm", 1)
    del engine.memory[0]["model.norm.weight"]
    tensors = attest(reg.stored("twins"), engine.url, None, None).tensors
    assert tensors["missing"] == ("model.norm.weight",)  # and not the tied lm_head.weight


def test_what_has_another_form_is_compared_with_a_baseline(
    start: Start, reg: Registry, tmp_path: Path
) -> None:
    engine = loaded(start, reg, "vllm", 1)
    (memory,) = engine.memory
    packed, cast = f"{LAYER}mlp.down_proj.weight", f"{LAYER}self_attn.o_proj.weight"
    memory[packed] = b""
    memory[cast] = np.frombuffer(memory[cast], np.float16).astype(np.float32).tobytes()
    assert kinds(reg, engine) == {"equal": 5, "changed or other form": 1, "other form": 1}
    path = tmp_path / "baseline"
    told, engine.version = engine.version, "default"
    with pytest.raises(InvalidInput, match="the engine was not told of this checkpoint"):
        kinds(reg, engine, baseline=path)
    assert not path.exists()
    engine.version = told
    expected = {"equal": 5, "unchanged": 1, "other form": 1}
    assert kinds(reg, engine, baseline=path) == expected
    before = path.read_bytes()
    assert kinds(reg, engine, baseline=path) == expected
    memory[cast] = memory[cast][::-1]
    assert kinds(reg, engine, baseline=path) == {"equal": 5, "changed": 1, "other form": 1}
    assert path.read_bytes() == before
    engine.version = "default"  # no longer matters
    assert kinds(reg, engine, baseline=path)["equal"] == 5
    refused = pytest.raises(InvalidInput, match="not a baseline of this checkpoint and engine")
    with refused:
        kinds(reg, engine, "llm/main/step1", baseline=path)
    for broken in (b"", b"[]", before[:-1], before.replace(b"norm", b"form"), b"[" * 10**5):
        path.write_bytes(broken)
        with refused:
            kinds(reg, engine, baseline=path)


def test_a_hash_of_sglang_s_own_is_not_comparable_without_a_baseline(
    start: Start, reg: Registry, tmp_path: Path
) -> None:
    engine = loaded(start, reg, "sglang", 2)
    assert isinstance(engine, SGLang)
    engine.is_gpu = True
    assert kinds(reg, engine) == {"other form": 14}
    assert kinds(reg, engine, baseline=tmp_path / "baseline") == {"unchanged": 14}
    engine.memory[1]["model.norm.weight"] = b"other"
    assert kinds(reg, engine, baseline=tmp_path / "baseline") == {"unchanged": 13, "changed": 1}


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_engine_that_gives_no_digests(
    start: Start, reg: Registry, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(start, reg, kind, 1)
    engine.has_checker = False
    with pytest.raises(RegistryError, match=r"gives no digests of its weights.*SGLang 0\.5\.23"):
        kinds(reg, engine)
    engine.has_checker, act = True, engine.act
    rank = {"checksums": {"w": "ab" * 8}, "parallelism_info": [{"tp_rank": 0, "tp_size": 1}]}
    placed = (
        {"tp_rank": 3, "tp_size": 2},
        {"tp_rank": 0, "tp_size": 10**9},
        {"tp_rank": 0.0, "tp_size": 1},
    )
    for answer in (
        *({}, {"ranks": []}, {"ranks": 5}, {"ranks": [{}]}, {"checksums": []}),
        *({"checksums": {}}, {"checksums": {"": "ab" * 32}}, {"checksums": {"w": 5}}),
        *({"checksums": {"w": "AB" * 32}}, {"checksums": {"tp99999:w": "ab" * 31}}),
        *({"ranks": [{**rank, "parallelism_info": [one]}]} for one in placed),
        {"ranks": [{**rank, "checksums": {"w": None}}]},
    ):

        def asked(path: str, query: str, body: Any, answer: Any = answer) -> tuple[int, Any]:
            return (200, answer) if path.endswith("_checker") else act(path, query, body)

        monkeypatch.setattr(engine, "act", asked)
        with pytest.raises(RegistryError, match="the engine gives no digests of its weights"):
            kinds(reg, engine)
    failed = {"ranks": [{**rank, "checksums": {"w": "ab" * 8}}], "checksums": {"w": "ab" * 32}}
    monkeypatch.setattr(engine, "act", lambda *_: (500, failed))
    with pytest.raises(RegistryError, match=r"gives no digests.*status 500"):
        kinds(reg, engine)
    monkeypatch.setattr(engine, "act", lambda *_: (403, {"detail": "no \x1b[31m key s3cret"}))
    (tmp_path / "key").write_text("s3cret")
    with pytest.raises(RegistryError, match=r"status 403: no \\x1b\[31m key \*\*\*"):
        kinds(reg, engine, key=tmp_path / "key")
    assert engine.asked[-1][2]["Authorization"] == "Bearer s3cret"


def test_other_weights_meanwhile_are_no_answer(
    start: Start, reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(start, reg, "sglang", 1)
    act = engine.act

    def told(path: str, query: str, body: Any) -> tuple[int, Any]:
        found = act(path, query, body)
        engine.version = "other" if path == "/weights_checker" else engine.version
        return found

    monkeypatch.setattr(engine, "act", told)
    with pytest.raises(RegistryError, match="the engine was told of other weights meanwhile"):
        kinds(reg, engine)


def test_the_command(start: Start, reg: Registry, tmp_path: Path) -> None:
    """It only asks, with the rules of `follow` for URLs, and says what it has found."""
    engine = loaded(start, reg, "vllm", 1)
    place = ("--registry", reg.handle.store.backend.url)
    words = ("attest", "--engine", engine.url, "llm")
    whole = invoke(*words, *place)
    assert whole.exit_code == 0
    name = f"llm/main/step00000002  {reg.checkpoint('llm').digest.short}"
    assert whole.stdout.splitlines() == [f"whole: {name}", "7 tensors equal"]
    assert {path for path, _, _ in engine.asked} == {
        *("/model_info", "/get_weight_version", "/weights_checker"),
        *("/weight_info", "/weight_checker"),
    }
    engine.memory[0]["model.norm.weight"] = b""
    found = invoke(*words, *place, "--baseline", tmp_path / "baseline", "--json")
    assert (found.exit_code, json.loads(found.stdout)["paths"]["other form"]) == (
        1,
        ["dp0:pp0:pcp0:tp0:model.norm.weight"],
    )
    for arguments, status, said in (
        (("attest", "--engine", engine.url, "file", "llm"), 2, "but no FILE"),
        (("attest", "file", "llm", "--baseline", "x"), 2, "but no FILE"),
        (("attest", "--engine", "http://169.254.169.254", "llm"), 3, "a link-local address"),
        (("attest", "--engine", "ftp://x", "llm"), 3, "not the URL of an engine"),
        (("attest", "--engine", engine.url, "llm/tags/none"), 4, "no such tag"),
        ((*words, "--key-file", tmp_path / "absent"), 3, "the key cannot be read"),
    ):
        refused = invoke(*arguments, *place)
        assert (refused.exit_code, said in refused.stderr) == (status, True), refused.stderr
