"""A program that writes to its arrays while they are saved harms nobody, itself included.

What it saves may be torn between moments; what is stored hashes to what it is called. Each test
writes at a chosen moment, so that it fails without the copy and not by chance.
"""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from botocore.awsrequest import AWSResponse

import holdfast
from holdfast import Storing
from holdfast.backends.s3.backend import S3Backend
from holdfast.registry.errors import UnsupportedValue
from holdfast.registry.face.factory import open_on
from holdfast.registry.spec import RunSpec
from holdfast.registry.writing.encoding import Encoding
from tests.support.faults import Hooked, Once
from tests.support.states import same
from tests.support.stores import new_backend

HOW = {
    "raw": {},
    "auto": {"storing": Storing(compression="auto")},
    "zstd": {"storing": Storing(compression="zstd")},
    "delta": {"storing": Storing(compression="zstd", keyframe_every=8)},
}
BIG = 150_000


def content(i: int) -> dict:
    """Return a state of one pack, whose arrays shrink and differ a little from those before."""
    w = np.repeat(np.arange(BIG // 50, dtype=np.float32), 50)
    w[:: max(1, BIG // 7)] += i
    return {
        "m": {
            "w": w,
            "small": np.full(40, i, np.int32),
            "tiny": np.array([i], np.int64),
            "frozen": np.arange(9000, dtype=np.int16),
            "noise": np.random.default_rng(i).random(3000),
            "text": bytearray(b"%d" % i * 5000),
        }
    }


def arrays(state: dict) -> list[np.ndarray]:
    m = state["m"]
    return [m["w"], m["small"], m["frozen"], m["noise"], np.frombuffer(m["text"], np.uint8)]


def scribble(state: dict) -> None:
    """Write to every array of a state, here and there."""
    for array in arrays(state):
        array[::7] = 113


class Moments(Hooked):
    """A store that tells when a pack is about to be put, and when one is read."""

    def at(self, moment: str, act, patch: pytest.MonkeyPatch) -> Once:
        once = Once("packs/", act, {"sent": "put", "base read": "get"}.get(moment, ""))
        if moment != "encoded":
            self.before = once
            return once
        encode = Encoding.encode

        def encoding(*args, **kwargs):
            once("encode", "packs/")
            return encode(*args, **kwargs)

        patch.setattr(Encoding, "encode", encoding)
        return once


@pytest.mark.parametrize("history", [0, 1, 3])
@pytest.mark.parametrize(
    ("codec", "moment"),
    [
        ("raw", "sent"),
        ("auto", "encoded"),
        ("zstd", "encoded"),
        ("zstd", "sent"),
        ("delta", "encoded"),
        ("delta", "base read"),
        ("delta", "sent"),
    ],
)
def test_what_is_written_after_hashing_is_in_no_pack(
    codec, moment, history, open_registry, monkeypatch
):
    if moment == "base read" and not history:
        return  # there is none
    how, store = HOW[codec], Moments(new_backend())
    careless = open_registry(store).create_run("careless")
    for step in range(history):
        careless.save(content(0), step=step, **how)
    given = content(1)
    once = store.at(moment, lambda: scribble(given), monkeypatch)
    saved = careless.save(given, step=5, **how)
    assert once.done
    assert not same(given, content(1))
    fresh = open_registry(store)
    assert same(fresh.checkpoint(str(saved.digest)).load(), content(1))
    # Another run, and this run's next save, build on what was stored.
    innocent = fresh.create_run("innocent")
    assert same(innocent.save(content(1), step=1, **how).load(), content(1))
    assert same(careless.save(content(1), step=6, **how).load(), content(1))
    assert same(careless.save(content(2), step=7, **how).load(), content(2))
    assert open_registry(store).verify(deep=True, decode=True).ok


def test_a_repeat_of_a_request_sends_the_same_bytes(moto_url, monkeypatch):
    url = moto_url()
    reg = holdfast.init(url, skip_race_probe=True)
    run = reg.create_run("careless")
    given = content(1)
    sent: list[str] = []

    def busy(request, **_: object) -> AWSResponse | None:
        if "/packs/" not in request.url:
            return None
        sent.append(request.url)
        if len(sent) > 1:
            return None
        scribble(given)
        return AWSResponse(request.url, 503, {}, _Empty())

    backend = reg.handle.store.backend
    client = next(one for one in _inner(backend) if isinstance(one, S3Backend))._client()
    client.meta.events.register("before-send.s3.PutObject", busy)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the SDK's pause
    saved = run.save(given, step=1)
    assert len(sent) > 1
    assert sent[0] == sent[1]
    reg.close()
    with holdfast.open(url) as again:
        assert same(again.checkpoint(str(saved.digest)).load(), content(1))
        innocent = again.create_run("innocent").save(content(1), step=1)
        assert same(innocent.load(), content(1))


def _inner(backend):
    while backend is not None:
        yield backend
        backend = getattr(backend, "_inner", None)


class _Empty:
    def stream(self, **_: object):
        return iter(())

    def read(self, *_: object) -> bytes:
        return b""


# What is found out about the bytes is of the bytes that are stored


WATCHED = RunSpec(finite=("m/*",))


@pytest.fixture
def store() -> Hooked:
    """Return a store with a run that watches for NaN, and a checkpoint of it."""
    store = Hooked(new_backend())
    with open_on(store) as reg:
        reg.create_run("run", preset=WATCHED).save(content(0), step=1)
    return store


def when_a_base_is_read(store: Hooked, act) -> Once:
    """Do something after a save has begun, and before it copies anything."""
    store.before = once = Once("manifests/", act, "get")
    return once


@pytest.mark.parametrize("history", ["given", "copied"])
def test_nan_is_looked_for_in_what_is_stored(store, open_registry, history):
    run, given = open_registry(store).run("run"), content(1)
    if history == "given":
        once = when_a_base_is_read(store, lambda: given["m"]["w"].fill(np.nan))
    else:
        store.before = once = Once("packs/", lambda: given["m"]["w"].fill(np.nan), "put")
    saved = run.save(given, step=2)
    assert once.done
    is_bad = np.isnan(saved.load()["m"]["w"]).any()
    assert is_bad == (history == "given")
    assert saved.nonfinite == (("m/w",) if is_bad else ())
    assert run.latest().step == (1 if is_bad else 2)


def test_nan_in_what_lies_in_the_manifest_and_in_many_tensors(store, open_registry):
    run, given = open_registry(store).run("run"), content(1)
    given["m"] |= {f"inline{n}": np.array([0.5, n / 2]) for n in range(20)}

    def spoil() -> None:
        given["m"]["inline3"][0] = np.inf

    once = when_a_base_is_read(store, spoil)
    assert run.save(given, step=2).nonfinite == ("m/inline3",)
    assert once.done
    for n in range(20):
        given["m"][f"inline{n}"][1] = np.nan
    named = run.save(given, step=3).nonfinite
    assert named == tuple(f"m/inline{n}" for n in range(8))


@pytest.mark.parametrize(("value", "becomes"), [(1e6, "infinity"), (1e-9, "zero")])
def test_numbers_that_come_after_the_first_look_are_refused_as_well(
    store, open_registry, value, becomes
):
    run, given = open_registry(store).run("run"), content(1)
    once = when_a_base_is_read(store, lambda: given["m"]["w"].fill(value))
    with pytest.raises(UnsupportedValue, match=rf"(?s)m/w.*would become {becomes}"):
        run.save(given, step=2, storing=Storing(precision={"m/w": "fp16"}))
    assert once.done
    assert [ck.step for ck in open_registry(store).run("run").checkpoints()] == [1]


# At any moment


def write_at_random(state: dict, after_s: float, over: threading.Event, seed: float) -> None:
    rng = random.Random(seed)
    time.sleep(after_s)
    for _ in range(rng.randint(1, 20)):
        for array in arrays(state):
            begin = rng.randrange(len(array))
            array[begin : begin + rng.randrange(1, len(array))] = rng.randrange(100)
        if over.is_set():
            return


def random_moments(count: int, seed: int) -> None:
    """Save while a thread writes to the state, again and again, into one registry."""
    rng = random.Random(seed)
    store = new_backend()
    reg = open_on(store)
    careless, innocent = reg.create_run("careless"), reg.create_run("innocent")
    duration_s = 0.02
    for step in range(1, count + 1):
        how = HOW[rng.choice(list(HOW))]
        true = content(step)
        given = content(step)
        over = threading.Event()
        arguments = (given, rng.uniform(0, duration_s), over, rng.random())
        thread = threading.Thread(target=write_at_random, args=arguments)
        thread.start()
        begun_s = time.perf_counter()
        saved = careless.save(given, step=step, **how)
        duration_s = 0.5 * duration_s + 0.5 * (time.perf_counter() - begun_s)
        over.set()
        thread.join()
        saved.load()  # torn, perhaps; never damaged
        assert same(innocent.save(true, step=2 * step, **how).load(), true)
        assert same(innocent.save(given, step=2 * step + 1, **how).load(), given)
    reg.close()
    with open_on(store) as fresh:
        for checkpoint in fresh.run("careless").checkpoints():
            checkpoint.load()
        assert fresh.verify(deep=True, decode=True).ok


def test_at_a_few_random_moments():
    random_moments(12, seed=4)


@pytest.mark.soak
def test_at_200_random_moments():
    random_moments(200, seed=11)
