"""A bucket that is stopped and started at random while a training with a journal is killed.

Training never waits for the bucket, and everything that was acknowledged is in it at the end, once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import holdfast
from tests.crash.journaling import train_until_killed
from tests.crash.pusher import state_at
from tests.servers.fixtures import S3Server
from tests.servers.gateway import Answer, Gateway
from tests.servers.process import start, stop, wait_for_http
from tests.servers.radosgw import missing_programs, start_gateway
from tests.support.pictures import RUN
from tests.support.processes import start_telling
from tests.support.sameness import assert_same

pytestmark = pytest.mark.xdist_group("forked")

Switch = Callable[[], None]
#: Saves that have to arrive during each outage, while the bucket is gone.
_SAVES_IN_OUTAGE = 2


@dataclass
class Training:
    """A process that trains, and the acknowledgements of all processes so far."""

    url: str
    journal: str
    last: int

    def __post_init__(self) -> None:
        self.acknowledged: dict[int, str] = {}
        self.is_done = False
        self.waited_s = 0.0
        self.start()

    def start(self) -> None:
        self._process, self._acks = start_telling(
            train_until_killed, self.url, self.journal, self.last
        )

    def hear(self) -> str:
        """Wait for the next event, and return its kind."""
        kind, step, digest, waited_s = self._acks.recv()
        if kind == "restored":
            assert step >= max(self.acknowledged, default=0), "an acknowledged save was lost"
        if kind == "saved":
            self.acknowledged[step] = digest
        self.waited_s += waited_s
        self.is_done = kind == "done"
        return kind

    def hear_saves(self, count: int) -> None:
        while count and not self.is_done:
            count -= self.hear() == "saved"

    def kill(self) -> None:
        """Kill the process, and hear what it had acknowledged."""
        self._process.kill()
        self._process.join()
        try:
            while True:
                self.hear()
        except EOFError:
            self._acks.close()

    def end(self) -> None:
        while not self.is_done:
            self.hear()
        self._process.join()
        assert self._process.exitcode == 0


def storm(url: str, journal: Path, down: Switch, up: Switch, *, saves: int, outages: int) -> None:
    """Let the bucket go and come, and kill the training in every third outage."""
    chance = random.Random(saves)
    training = Training(url, str(journal), saves)
    training.hear_saves(1)
    each = saves // outages - _SAVES_IN_OUTAGE - 1
    happened = deaths = 0
    for number in range(outages):
        training.hear_saves(chance.randint(0, each))
        if training.is_done:
            break
        down()
        happened += 1
        training.hear_saves(_SAVES_IN_OUTAGE)  # they do not wait for the bucket
        if number % 3 == 0:
            training.kill()
            deaths += 1
            training.start()
        up()
        training.hear_saves(1)
    training.end()
    assert training.waited_s == 0
    assert sorted(training.acknowledged)[-1] == saves
    with holdfast.open(url, journal="") as registry:
        run = registry.run(RUN)
        added = [
            (action.step, action.manifest.hex())
            for commit in run.history.commits()
            for action in commit.actions
            if action.action == "checkpoint.add"
        ]
        assert [step for step, _ in added] == list(range(1, saves + 1))
        assert dict(added).items() >= training.acknowledged.items()
        assert registry.verify(deep=True).findings == ()
        _check_at_rest(url, journal)
        assert_same(run.latest().load(), state_at(saves))
        orphans = registry.gc(grace_s=0).condemned.objects
        assert registry.gc(grace_s=0).condemned.objects == 0, f"{orphans} went, and some stay"
    print(
        f"{saves} saves, {len(training.acknowledged)} heard of, {happened} outages, {deaths} "
        f"deaths; training waited {training.waited_s:.1f} s for the bucket"
    )


def _check_at_rest(url: str, journal: Path) -> None:
    """Check that nothing waits any more, and that one attempt is enough to go on."""
    with holdfast.open(url, journal=str(journal)) as registry:
        run = registry.run(RUN)
        backlog = run.backlog()
        assert backlog is not None
        waits = (backlog.entries, backlog.refused, backlog.stranded, backlog.damaged)
        assert waits == (0, 0, 0, 0)
        assert run.restore() is not None


@pytest.mark.timeout(600)
def test_a_bucket_that_hangs_up(
    s3_url: Callable[[], str],
    gateway: Gateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = s3_url()
    holdfast.init(url, skip_race_probe=True).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.url)
    monkeypatch.setenv("HOLDFAST_S3_TIMEOUT", "6")

    def hang_up(*_: object) -> Answer:
        raise ConnectionAbortedError

    storm(
        url,
        tmp_path / "journal",
        lambda: gateway.lie(lambda request: True, hang_up),
        gateway.be_honest,
        saves=16,
        outages=3,
    )


@contextmanager
def _radosgw(folder: Path) -> Iterator[tuple[S3Server, Switch, Switch]]:
    """Start a radosgw of our own; return it, and what stops and starts its gateway."""
    found = start_gateway(folder)
    *others, http = found.pids
    pids = [http]

    def down() -> None:
        stop(pids, grace_s=0.2)

    def up() -> None:
        command = ["radosgw", "-f", "-n", "client.admin", "-c", str(folder / "ceph.conf")]
        pids[0] = start(command, folder / "radosgw.out")
        wait_for_http(found.endpoint_url)

    try:
        yield S3Server(found.endpoint_url, found.access_key, found.secret_key), down, up
    finally:
        stop([*pids, *others])


@pytest.mark.soak
@pytest.mark.sometimes("training goes on without the registry")
@pytest.mark.timeout(3600)
def test_a_bucket_that_is_stopped_and_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)}")
    with _radosgw(tmp_path / "radosgw") as (server, down, up):
        server.set_environment(monkeypatch)
        url = _bucket(server)
        holdfast.init(url, skip_race_probe=True).close()  # the first request takes seconds
        monkeypatch.setenv("HOLDFAST_S3_TIMEOUT", "12")
        storm(url, tmp_path / "journal", down, up, saves=300, outages=30)


def _bucket(server: S3Server) -> str:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )
    client.create_bucket(Bucket="outages")
    return "s3://outages/registry"
