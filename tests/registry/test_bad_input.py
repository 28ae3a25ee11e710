"""Bad input gets a clear error: named, numbered as in the list of bad inputs, and nothing written.

Each test here carries its line's number. Lines that the core cannot meet by itself:

- backends: 7 and 8 (hard links, network file systems), 10, 12 to 15 (credentials, bucket, owner,
  KMS, clock), 54 to 57 as the operating system says them, 69 as a whole.
- formats and command line: 38, 48 to 50 (foreign files), 53 (export targets), 70 (signals).
- later, with the features they are about: 60 to 62 (collection, retention), 68 (signatures).
"""

from __future__ import annotations

import itertools
import threading
import uuid
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Storing, sync
from holdfast.backends import limits
from holdfast.backends.errors import AccessDenied, StoreFull, StoreUnavailable, StoreUnsuitable
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.probe import probe_put_if_absent
from holdfast.backends.wrappers import ReadOnly, Wrapper
from holdfast.registry.errors import (
    AmbiguousRef,
    BeyondLimit,
    Conflict,
    Damaged,
    Diverged,
    IncompatibleState,
    InvalidInput,
    InvalidLocation,
    Malformed,
    MissingObject,
    NotFound,
    ReadOnlyStore,
    RegistryError,
    UnsupportedFormat,
    UnsupportedValue,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.history import authorship, slots
from holdfast.registry.history.actions import SetStatus
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects import framing
from holdfast.registry.objects.framing import join_lines, split_lines, wrap_frame
from holdfast.registry.objects.keys import slot_key
from holdfast.registry.objects.manifest import Manifest
from holdfast.registry.spec import RunSpec
from holdfast.registry.store.store import read_config
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from tests.support.faults import Liar, flip
from tests.support.states import save_small, small_state
from tests.support.stores import contents, new_backend, objects, packs_of


@contextmanager
def refused(backend, error, *said, exit_code, only=""):
    """Expect exactly this error, these words in its message, this exit code, and nothing written.

    `only` narrows the last to a prefix: a state that was written in vain is no part of a history.
    """
    before = contents(backend, only)
    with pytest.raises(RegistryError) as caught:
        yield
    assert type(caught.value) is error, caught.value
    assert caught.value.exit_code == exit_code
    for word in said:
        assert word in str(caught.value)
    assert contents(backend, only) == before


@pytest.fixture
def saved(run):
    return run.save(small_state(), step=1)


def test_bad_input_01_not_a_registry():
    backend = MemoryBackend("nothing-here")
    said = ("memory://nothing-here", "not a registry", "registry.json", "holdfast.init(")
    with refused(backend, NotFound, *said, exit_code=4):
        open_on(backend)


@pytest.mark.parametrize("size", [0, 1, 64, 65, 100, -1])
def test_bad_input_02_config_truncated(backend, size):
    backend.put("registry.json", backend.get("registry.json")[:size])
    with refused(backend, Damaged, "registry.json", "expected", "found", exit_code=6):
        open_on(backend)


def _config(backend, **changes):
    (line,) = split_lines(backend.get("registry.json"), where="x")
    body = canonical.decode(line, where="x") | changes
    backend.put("registry.json", join_lines([canonical.encode(body)]))


def test_bad_input_03_config_of_an_unknown_major_version(backend):
    _config(backend, format="holdfast.registry/2")
    said = ("expected holdfast.registry/1", "holdfast.registry/2", "upgrade")
    with refused(backend, UnsupportedFormat, *said, exit_code=8):
        open_on(backend)


def test_bad_input_03_config_with_an_unknown_field(backend):
    _config(backend, more=1)
    with refused(backend, Malformed, "registry.json", "more", exit_code=6):
        open_on(backend)


def test_bad_input_04_config_demands_a_newer_writer(backend):
    _config(backend, min_writer=99)
    said = ("expected writer version 99", "found writer version 4", "pip install -U")
    with refused(backend, UnsupportedFormat, *said, exit_code=8):
        open_on(backend)


def test_bad_input_05_registry_id_differs_from_the_remembered_one():
    name = uuid.uuid4().hex
    backend = new_backend(name)
    said = ("expected " + "0" * 32, f"found {read_config(backend).id}", name)
    with refused(backend, Conflict, *said, exit_code=5):
        holdfast.open(f"memory://{name}", expect_id="0" * 32)


def test_bad_input_06_store_that_lets_two_writers_win():
    class Overwrites(Wrapper):
        def put_if_absent(self, key, body):
            self.inner.put(key, body)
            return True

    with pytest.raises(StoreUnsuitable) as caught:
        probe_put_if_absent(Overwrites(MemoryBackend()), prefix=".probe/x")
    assert caught.value.exit_code == 8


def test_bad_input_09_read_only_store_on_push(backend, saved):
    with open_on(ReadOnly(backend)) as reader:
        run = reader.run("run")
        with refused(backend, ReadOnlyStore, "opened for reading", exit_code=7):
            run.save(small_state(2), step=2)


class Failing(Wrapper):
    """Fails every write with this error once told to."""

    error: Exception | None = None

    def put_if_absent(self, key, body):
        if self.error:
            raise self.error
        return super().put_if_absent(key, body)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (11, AccessDenied("the token has expired", where="s3://b")),
        (54, StoreFull("no space left", expected="7 MB", found="1 MB")),
        (55, StoreFull("quota exceeded")),
        (56, AccessDenied("permission denied", where="/data", found="uid 1000")),
    ],
    ids=["11", "54", "55", "56"],
)
def test_bad_input_11_54_55_56_the_store_refuses_in_the_middle(backend, line, error):
    failing = Failing(backend)
    with open_on(failing) as registry_:
        run = registry_.create_run("run")
        failing.error = error
        with refused(backend, type(error), str(error), exit_code=7):
            run.save(small_state(), step=1)
        failing.error = None
        assert run.save(small_state(), step=1).step == 1


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 129,
        "a/b",
        "..",
        ".",
        ".hidden",
        "a\0b",
        "trailing.",
        "CON",
        "nul",
        "com1.txt",
        "a b",
        "ä",
        "-a",
        "a\n",
        "LPT9",
    ],
)
def test_bad_input_16_run_name(reg, backend, name):
    for begin in (reg.create_run, lambda n: reg.run(n, create=True)):
        if name == "" and begin is not reg.create_run:
            continue
        with refused(backend, InvalidInput, "not a legal run id", "1 to 128", exit_code=3):
            begin(name)


def test_bad_input_17_run_absent(reg, backend, run):
    with refused(backend, NotFound, "runn", "no such run", "Did you mean 'run'?", exit_code=4):
        reg.run("runn")
    with refused(backend, NotFound, "other", "`reg.run(name, create=True)`", exit_code=4):
        reg.run("other")


@pytest.mark.parametrize(
    "step",
    [-1, float("nan"), True, False, 1.0, 1.5, 2**53 + 1, 2**63, "1", None, np.float32(1), np.True_],
)
def test_bad_input_18_step(run, backend, step):
    for save in (run.save, run.save_async):
        with refused(
            backend, InvalidInput, "not a step", "whole number from 0", repr(step), exit_code=3
        ):
            save(small_state(), step=step)


def test_bad_input_18_step_as_a_flag_of_torch(run):
    with pytest.raises(InvalidInput):
        run.save(small_state(), step=torch.tensor(True))


def test_bad_input_19_step_taken_by_another_state(run, backend, saved):
    said = ("run: phase main, step 1", saved.digest.short, "run.restore()")
    with refused(backend, Conflict, *said, exit_code=5, only="runs/"):
        run.save(small_state(2), step=1)


def test_bad_input_20_ambiguous_digits(reg, backend):
    from holdfast.registry.history.actions import AddCheckpoint

    reg.create_run("run")
    log_ = RunLog(reg.handle.store, "run")
    log_.open()
    for i in (1, 2):
        digest = Digest(bytes.fromhex("abcdef12") + bytes([i]) * 28)
        reg.handle.store.backend.put(f"manifests/ab/{digest.hex()}.0", b"")
        action = AddCheckpoint(manifest=digest, phase="main", step=i, size_bytes=0)
        log_.append(lambda state, action=action: [commit_line(state, [action])])
    for ref in ("run/abcdef12", "abcdef12"):
        with refused(
            backend, AmbiguousRef, "abcdef120101, abcdef120202", "more digits", exit_code=4
        ):
            reg.checkpoint(ref)


@pytest.mark.parametrize("text", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64])
def test_bad_input_21_malformed_digest(backend, text):
    with refused(backend, InvalidInput, repr(text), "64 lower-case", exit_code=3):
        Digest.parse(text)


@pytest.mark.parametrize("text", ["md5:" + "a" * 32, "sha512:" + "a" * 64])
def test_bad_input_22_unknown_algorithm(backend, text):
    with refused(backend, InvalidInput, "expected sha256", text.split(":")[0], exit_code=3):
        Digest.parse(text)


@pytest.mark.parametrize("kind", ["packs", "manifests", "placements"])
def test_bad_input_24_25_object_swept_or_missing(backend, saved, kind):
    key = next(key for key in sorted(objects(backend)) if key.startswith(kind))
    backend.delete(key)
    with open_on(backend) as fresh:
        with refused(backend, MissingObject, key, "gone", "holdfast verify", exit_code=6):
            fresh.checkpoint("run").load()
        (finding,) = fresh.verify().findings
    assert finding.affects == (saved.ref,)


def test_bad_input_26_object_short(backend, saved):
    key = packs_of(saved)[0]
    data = backend.get(key)
    backend.put(key, data[:50])
    with open_on(backend) as fresh:
        said = (key, f"expected {len(data)} bytes", "found 50 bytes")
        with refused(backend, Damaged, *said, exit_code=6):
            fresh.checkpoint("run").load()


def test_bad_input_27_object_long(backend, saved):
    key = packs_of(saved)[0]
    data = backend.get(key)
    backend.put(key, data + b"x")
    with open_on(backend) as fresh:
        (finding,) = fresh.verify().findings
    assert key in finding.message
    assert f"expected {len(data)} bytes; found {len(data) + 1}" in finding.message


@pytest.mark.parametrize("kind", ["manifests", "placements"])
def test_bad_input_26_27_description_short_or_long(backend, saved, kind):
    (key,) = [key for key in objects(backend) if key.startswith(kind)]
    data = backend.get(key)
    for other in (data[:-1], data[:10], b"", data + b"x"):
        backend.put(key, other)
        with open_on(backend) as fresh, refused(backend, Damaged, key, "expected", exit_code=6):
            fresh.checkpoint("run").load()


def test_bad_input_28_hash_mismatch(backend, saved):
    key = packs_of(saved)[0]
    flip(backend, key, 9)
    with open_on(backend) as fresh:
        said = (f"{key} at offset 0", "expected sha256:", "found sha256:", "--deep")
        with refused(backend, Damaged, *said, exit_code=6):
            fresh.checkpoint("run").load()


def test_bad_input_29_log_gap(backend, run):
    save_small(run, *range(3))
    backend.delete(slot_key("run", 2))
    with open_on(backend) as fresh:
        said = ("run", "expected slot 2", "found slot 3", "mirror")
        with refused(backend, Malformed, *said, exit_code=6):
            fresh.run("run")


def _slot(backend, number: int, *lines: bytes) -> str:
    key = slot_key("run", number)
    backend.put(key, join_lines(lines))
    return key


@pytest.mark.parametrize(
    ("line", "error", "exit_code", "found"),
    [
        (b"{", Malformed, 6, "Expecting"),
        (b"[]", Malformed, 6, ""),
        (b'{"kind":"mark"}', Malformed, 6, "epoch"),
        (b'{"epoch":1,"kind":"mark","more":1}', Malformed, 6, "more"),
        (b'{"kind":"unheard"}', UnsupportedFormat, 8, "unheard"),
    ],
)
def test_bad_input_30_log_entry(backend, saved, line, error, exit_code, found):
    key = _slot(backend, 2, line)
    with open_on(backend) as fresh, refused(backend, error, key, found, exit_code=exit_code):
        fresh.run("run")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"epoch":1,"epoch":1,"kind":"mark"}', id="31 duplicate keys"),
        pytest.param(b'{"epoch":NaN,"kind":"mark"}', id="32 NaN"),
        pytest.param(b'{"epoch":Infinity,"kind":"mark"}', id="32 Infinity"),
        pytest.param(b'{"epoch":1e999,"kind":"mark"}', id="32 overflow"),
        pytest.param(b'{"epoch":1,"kind":"m\xff"}', id="33 invalid UTF-8"),
        pytest.param(b'{"epoch":1,"kind":"\\ud800"}', id="33 lone surrogate"),
        pytest.param(b'{"epoch":1, "kind":"mark"}', id="30 white space"),
        pytest.param(b'{"kind":"mark","epoch":1}', id="30 key order"),
    ],
)
def test_bad_input_31_32_33_json(backend, saved, line):
    key = _slot(backend, 2, line)
    said = (key, "not canonical JSON")
    with open_on(backend) as fresh, refused(backend, Malformed, *said, exit_code=6):
        fresh.run("run")


@pytest.mark.parametrize("state", [{"m": {"\ud800": 1}}, {"m": {"k": "\udfff"}}, {"\ud800": {}}])
def test_bad_input_33_lone_surrogates_in_a_state(run, backend, state):
    with refused(backend, UnsupportedValue, "lone surrogate", "state['", exit_code=3):
        run.save(state, step=1)


def test_bad_input_33_names_that_look_alike_are_two_names(run):
    state = {"é": {"x": 1}, "e\u0301": {"x": 2}}
    assert list(run.save(state, step=1).load()) == ["é", "e\u0301"]


def test_bad_input_34_history_that_does_not_chain(backend, saved, open_registry):
    state = open_registry(backend).run("run").manifest
    line = commit_line(state, [SetStatus(status="failed")])
    forged = line.changed(prev=Digest.of(b"another history"))
    _slot(backend, 2, forged.encode())
    with open_on(backend) as fresh:
        said = ("run: slot 2", "commit 2 does not chain to the one before", "do not write")
        with refused(backend, Malformed, *said, exit_code=6):
            fresh.run("run")


def test_bad_input_35_save_after_the_run_was_completed(run, backend, saved, open_registry):
    run.status = "completed"
    other = open_registry(backend).run("run")
    said = ("run", "completed", "run.status = 'running'")
    with refused(backend, Conflict, *said, exit_code=5, only="runs/"):
        other.save(small_state(2), step=2)


def _nested(depth: int):
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_bad_input_37_state_too_deep(run, backend):
    with refused(backend, UnsupportedValue, "state['m']", exit_code=3):
        run.save({"m": _nested(150)}, step=1)


def test_bad_input_37_manifest_too_large(monkeypatch, backend):
    data = wrap_frame(b"x" * 1000)
    monkeypatch.setenv(limits.VARIABLE, "999")
    said = ("the/key", "expected at most 999", "found about 1000", limits.VARIABLE)
    with refused(backend, BeyondLimit, *said, exit_code=6):
        Manifest.decode(data, Digest.of(b""), where="the/key")


def test_bad_input_37_manifest_too_deep(backend):
    data = wrap_frame(b"[" * 100_000 + b"]" * 100_000)
    with refused(backend, Malformed, "the/key", exit_code=6):
        Manifest.decode(data, Digest.of(b""), where="the/key")


@pytest.mark.parametrize("depth", [70, 95])
def test_bad_input_37_meta_that_a_state_could_hold(run, depth):
    value: dict = {}
    for _ in range(depth):
        value = {"x": value}
    try:
        assert run.save(small_state(), step=1, meta=value).meta == value
    except InvalidInput:
        return


def _manifest(**changes):
    entry = {"dtype": "int8", "shape": [100], "chunks": ["0" * 64]} | changes
    part = {"grid": "rows/1", "skeleton": {"d": []}, "tensors": [entry]}
    body = {"format": "holdfast.checkpoint/1", "kind": "dict", "components": [["m", part]]}
    return wrap_frame(canonical.encode(body))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        pytest.param({"shape": [-1]}, "not a shape", id="39 negative"),
        pytest.param({"shape": [2**52, 2**52]}, "beyond 2^63", id="39 overflow"),
        pytest.param({"shape": [2]}, "1 chunks do not cover", id="39 product"),
        pytest.param({"dtype": "float33"}, "unknown dtype 'float33'", id="40 unknown"),
        pytest.param({"dtype": "object"}, "unknown dtype 'object'", id="40 object"),
        pytest.param({"dtype": ">f4"}, "unknown dtype '>f4'", id="41 byte order"),
        pytest.param({"chunks": []}, "0 chunks do not cover", id="42 too few"),
        pytest.param({"chunks": ["0" * 64] * 2}, "2 chunks do not cover", id="42 too many"),
    ],
)
def test_bad_input_39_to_42_manifest(backend, changes, found):
    with refused(backend, Malformed, "the/key", found, exit_code=6):
        Manifest.decode(_manifest(**changes), Digest.of(b""), where="the/key")


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.zeros(3, dtype=[("a", "i4")]),
        np.array(["text"]),
    ],
)
def test_bad_input_40_arrays_of_other_types(run, backend, array):
    with refused(backend, UnsupportedValue, "state['m']['w']", exit_code=3):
        run.save({"m": {"w": array}}, step=1)


def test_bad_input_43_codec(backend):
    from holdfast.registry.objects.codecs import codec_name, codec_number

    known = "expected raw, blosc-zstd, blosc-lz4"
    with refused(backend, Malformed, "the/key", known, "found python", exit_code=6):
        codec_number("python", where="the/key")
    with refused(backend, Malformed, "the/key", "expected 0..2", "found 7", exit_code=6):
        codec_name(7, where="the/key")


def test_bad_input_44_45_size_and_ratio(backend, monkeypatch):
    bomb = wrap_frame(bytes(10**6))
    assert len(bomb) < 1000
    monkeypatch.setenv(limits.VARIABLE, "100000")
    with refused(backend, BeyondLimit, "too much memory", "found about 1000000", exit_code=6):
        framing.unwrap_frame(bomb, where="x")


def test_bad_input_46_target_of_another_size(backend, saved):
    target = small_state(9)
    target["model"]["w"] = np.zeros(599, np.float32)
    said = ("run/main/step00000001", "model/w is float32[600], target float32[599]")
    with refused(backend, IncompatibleState, *said, exit_code=3):
        saved.load_into(target)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.empty(100, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(100), 0.1, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_input_47_tensors_without_plain_bytes(run, backend, make, said):
    tensor = make()
    with refused(backend, UnsupportedValue, "state['m']['w']", said, exit_code=3):
        run.save({"m": {"w": tensor}}, step=1)


def test_bad_input_47_sparse_and_complex_tensors_come_back(run):
    sparse = torch.eye(50).to_sparse()
    state = {"m": {"s": sparse, "c": torch.ones(50, dtype=torch.complex64)}}
    loaded = run.save(state, step=1).load()
    assert torch.equal(loaded["m"]["s"].to_dense(), torch.eye(50))
    assert torch.equal(loaded["m"]["c"], state["m"]["c"])


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({5: {}}, "state[5]"),
        ([1], "state"),
        (None, "state"),
        ({"m": {"f": lambda: 0}}, "state['m']['f']"),
        ({"m": [1, {"x": object()}]}, "state['m'][1]['x']"),
        ({"m": {"w": threading.Lock()}}, "state['m']['w']"),
    ],
)
def test_bad_input_51_leaf(run, backend, state, path):
    with refused(backend, UnsupportedValue, path, exit_code=3):
        run.save(state, step=1)


def test_bad_input_52_circular_reference(run, backend):
    state: dict = {"m": {}}
    state["m"]["self"] = state
    with refused(backend, UnsupportedValue, "state['m']['self']", exit_code=3):
        run.save(state, step=1)


def test_bad_input_58_a_minute_of_lost_races(backend, saved, monkeypatch, open_registry):
    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(authorship, "author", lambda: "winner@gpu7")
    rival = open_registry(backend).run("run")

    class Loses(Wrapper):
        def put_if_absent(self, key, body):
            if key.startswith("runs/run/log/"):
                rival.status = "running"
            return super().put_if_absent(key, body)

    loser = open_registry(Loses(backend)).run("run")
    with pytest.raises(Conflict, match=r"run: lost \d+ races.*winner@gpu7.*Nothing was") as caught:
        loser.pins.tags.set("t", loser.latest())
    assert caught.value.exit_code == 5
    assert open_registry(backend).run("run").manifest.tags == {}


def test_bad_input_59_commit_state_unknown(backend, saved, monkeypatch, open_registry):
    monkeypatch.setattr(slots.time, "sleep", lambda seconds: None)

    run = open_registry(Liar(backend)).run("run")
    said = (slot_key("run", 2), "unknown whether the commit landed", "holdfast log run")
    with refused(backend, StoreUnavailable, *said, exit_code=7):
        run.status = "failed"


def test_bad_input_63_best_by_an_unknown_metric(reg, backend):
    run = reg.create_run("m", monitor=holdfast.Monitor(metric="loss", mode="min"))
    run.save(small_state(), step=1, metrics={"loss": float("nan")})
    with refused(backend, NotFound, "m/best/lss", "Did you mean 'loss'?", exit_code=4):
        reg.checkpoint("m/best/lss")
    with refused(backend, NotFound, "none with the monitored metric", exit_code=4):
        reg.checkpoint("m/best")


@pytest.mark.parametrize("value", ["low", None, True, [1.0], 1j])
def test_bad_input_63_metric_that_is_no_number(run, backend, value):
    said = ("loss", "not a number", type(value).__name__)
    with refused(backend, InvalidInput, *said, exit_code=3):
        run.save(small_state(), step=1, metrics={"loss": value})


@pytest.fixture
def two_registries(open_registry):
    backends = [new_backend(uuid.uuid4().hex) for _ in range(2)]
    return [(backend, open_registry(backend)) for backend in backends]


def test_bad_input_64_sync_diverged(two_registries):
    (_, source), (dst, target) = two_registries
    for registry_ in (source, target):
        registry_.create_run("run")
    with refused(dst, Diverged, "run: commit 0", "expected the source's", exit_code=5):
        sync(source, target)


def test_bad_input_65_sync_to_self(two_registries, open_registry):
    (src, source), _ = two_registries
    with refused(src, InvalidInput, src.url, "to itself", exit_code=3):
        sync(source, open_registry(src))


def test_bad_input_66_source_swept_during_sync(two_registries, open_registry):
    (src, source), (dst, target) = two_registries
    checkpoint = source.create_run("run").save(small_state(), step=1)
    src.delete(packs_of(checkpoint)[0])
    with pytest.raises(MissingObject, match=packs_of(checkpoint)[0]) as caught:
        sync(source, target)
    assert caught.value.exit_code == 6
    assert open_registry(dst).run("run").latest() is None


@pytest.mark.parametrize(
    ("url", "said"),
    [("nosuch://host/x", "unknown scheme"), ("s3://key:secret@bucket/x", "credentials in a URL")],
)
def test_bad_input_69_url(backend, url, said):
    for call in (holdfast.init, holdfast.open):
        with refused(backend, InvalidLocation, said, exit_code=3):
            call(url)


def test_an_option_that_there_is_not_is_refused(reg, run):
    calls = [
        lambda: run.save(small_state(), step=1, metric={"loss": 1.0}),
        lambda: run.save_async(small_state(), step=1, streams_={}),
        lambda: run.exchange.push(small_state(), step=1, companion={}),
        lambda: reg.create_run("other", retension=None),
        lambda: reg.run("run", create=True, monitors=()),
        lambda: run.phases.transition("2", target={}),
        lambda: run.exchange.merge([], step=1, weight=[1.0]),
        lambda: reg.fork("run", "fork", retension=None),
        lambda: run.follow.checkpoints(pol_s=1.0),
        lambda: run.follow.into({}, timeout=1.0),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call()
    assert reg.run_names() == ["run"]
    assert run.latest() is None


def test_bad_input_23_24_67_evicted(run, backend, reg):
    first = run.save(small_state(), step=1)
    run.save(small_state(1), step=2)
    run.retention.prune(holdfast.Retention(last=1))
    said = ("run/main/step00000001", "found commit 3 of 2", "not among last 1", "holdfast undo")
    with refused(backend, Conflict, *said, exit_code=5):
        run.restore(at=first)
    with refused(backend, Conflict, *said, exit_code=5):
        reg.fork(first, "fork")
    for key in packs_of(first):
        backend.delete(key)
    said = ("was evicted, and its data was collected", "found commit 3 of 2", "A mirror")
    with refused(backend, MissingObject, *said, exit_code=6):
        first.load()


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 2**2048], ids=["much", "less", "more"])
def test_integers_of_any_length_are_refused_by_typed_errors(reg, run, saved, value):
    calls = [
        lambda: run.save(small_state(), step=value),
        lambda: run.save(small_state(), step=2, phase=value),
        lambda: run.save(small_state(), step=2, storing=Storing(keyframe_every=value)),
        lambda: run.history.checkpoint(value),
        lambda: run.pool.entry(value),
        lambda: run.streams["rows"].append([{"step": value}]),
        lambda: run.follow.checkpoints(hold_s=value),
        lambda: reg.create_run("other", seed=value),
        lambda: reg.gc(grace_s=value),
        lambda: reg.verify(sample=value),
        lambda: reg.checkpoint(value),
        lambda: holdfast.open(value),
        lambda: saved["model/w"][value],
    ]
    for call in calls:
        with pytest.raises(RegistryError, match=r"\d+ bits\)|must be") as caught:
            call()
        assert caught.value.exit_code in (3, 4)


def test_a_configuration_may_hold_integers_of_any_length(reg, caplog):
    config = {10**5000: 10**5000, "nested": [10**5000]}
    with pytest.warns(holdfast.registry.history.creating.SecretWarning, match="0x"):
        reg.create_run("big", config=config | {"password": "x", 10**5001: {"password": "y"}})
    assert reg.run("big").config["nested"] == [10**5000]
    reg.run("big", config=config | {10**5000: 0})
    assert 'first at {"i":"' in caplog.text
    assert len(caplog.text) < 1000


def test_lines_of_the_log_are_tamed(reg, caplog):
    run = reg.create_run("watched", preset=RunSpec(finite=("*",)))
    run.save({"m\x1b[2J\u202e": np.full(100, np.nan, np.float32)}, step=1)
    assert r"m\x1b[2J\u202e" in caplog.text
    assert "\x1b" not in caplog.text
