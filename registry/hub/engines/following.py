"""Follow a run with a folder, and tell the engines of this host of each version.

The loop looks at the log, makes the folder of a newer version and switches to it. Each engine has a
thread of its own, which tells it of the newest version until it has confirmed that; so a dead one
holds nobody up, and none is ever told of an older version than before.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from holdfast.backends.escape import quoted
from holdfast.registry.curation.streams import Streams
from holdfast.registry.errors import (
    IntegrityError,
    InvalidInput,
    MissingObject,
    RegistryError,
    StorageError,
)
from holdfast.registry.face import Run
from holdfast.registry.history import check_phase, format_time
from holdfast.registry.history.replay import CheckpointRecord
from holdfast.registry.hub.engines.folder import FollowedVersion, HostFolder
from holdfast.registry.hub.engines.publishing import WeightFolders
from holdfast.registry.hub.engines.telling import Engine, Notify, Requests, engines_at
from holdfast.registry.hub.views import ViewOptions, check_weights, view_of
from holdfast.registry.loading import Checkpoint
from holdfast.registry.loading.following import OVER, Patience
from holdfast.registry.values import HERE

#: The stream in which followers report.
STREAM = "engines"
_REPORT_S = 60.0  # the shortest time between two entries of a follower
_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
_LONGEST_DAMAGE_S = 300.0  # the longest pause before a damaged version is fetched again
_ASK_S = 10.0  # between two questions of what an engine has loaded
# Tests replace this clock.
_monotonic = time.monotonic


class _Damage(NamedTuple):
    """A version that cannot be read."""

    n: int
    error: IntegrityError
    tries: int
    again_s: float  # when it is tried again, by the monotonic clock

    def status(self) -> dict[str, Any]:
        """Return its entry in the status file."""
        again_s = time.time() + self.again_s - _monotonic()
        return {"n": self.n, "tries": self.tries, "again": format_time(round(again_s) * 1000)}


class EngineFollower:
    """Keeps engines of this host at the newest version of a run.

    ```python
    with EngineFollower(run, "/dev/shm/policy", notify="sglang", urls=[url]) as follower:
        follower.run()
    ```

    `DIR/current` leads to the files of the newest version, in the layout of Hugging Face. Only
    chunks that differ from the version before are fetched, and every byte is verified. Each engine
    is told of the folder of that one version, which is never changed: it loads one version, whole.
    A follower that starts again continues with the folder as it is.

    Args:
        run: The run. To read it is enough, unless `report` is set.
        into: An empty folder on a disk of the engines' host, or that of an earlier follower. It
            holds two versions, and one more for each engine that stays behind.
        notify: `"sglang"` or `"vllm"`, or what to call with a `FollowedVersion`; a call that raises
            an error is repeated.
        urls: URLs of the engines, such as `http://127.0.0.1:30000`; none if `notify` is a call.
        best: Follow the best checkpoint by the run's first monitor, not the newest.
        phase: Only checkpoints of this phase.
        backwards: Also take an older checkpoint than the one that is here, after a rewind, an
            eviction or a late metric. By default the engines keep the newer one.
        requests: What becomes of requests that an engine is answering: `wait` until they end,
            `pause` them and go on with the new weights, or `abort` them.
        key: A key for the engines, sent as `Authorization: Bearer`.
        answer_s: Seconds that an engine may take to answer, such as to load the weights.
        report: Whether to append to the stream `engines` of the run which version the engines have,
            at most once a minute. This needs the right to append.
        shard_bytes: Bytes of tensors in a file of weights, at most.
        poll_s: Seconds between looks at the log, at most.
        follow: Whether to wait for more; `False` ends `run` when every engine has the newest.
        note: Called with each line of text about an engine or an error; by default nobody is.

    Raises:
        InvalidInput: A URL, a folder, a phase or a time is not legal, or the run has no monitor.
        Conflict: Another follower keeps the folder, or it is the folder of another run.
    """

    def __init__(
        self,
        run: Run,
        into: str | os.PathLike[str],
        *,
        notify: Notify,
        urls: Sequence[str] = (),
        best: bool = False,
        phase: int | str | None = None,
        backwards: bool = False,
        requests: Requests = "wait",
        key: str | None = None,
        answer_s: float = 600.0,
        report: bool = False,
        shard_bytes: int = 5_000_000_000,
        poll_s: float = 1.0,
        follow: bool = True,
        note: Callable[[str], object] = lambda text: None,  # noqa: ARG005
    ) -> None:
        handle = run.handle
        self._store, self._log = handle.store, handle.log
        self._phase = None if phase is None else check_phase(phase)
        self._monitor = run.phases.monitor(phase) if best else None
        self._backwards, self._note = backwards, note
        self._follow, self._patience = follow, Patience(poll_s)  # it grows while something fails
        self._options = ViewOptions(shard_bytes)
        self._streams = Streams(handle.committer) if report else None
        self._reported: tuple[object, float] = None, -_REPORT_S
        self._skipped: int | None = None
        self._error, self._over = "", threading.Event()
        self._damage: _Damage | None = None
        # An engine would load an adapter as the model.
        self._is_call = callable(notify) and not isinstance(notify, WeightFolders)
        engines = engines_at(notify, urls, key, requests, answer_s)
        self._folder = HostFolder(self._store, run.id, Path(into))
        # An engine may still have one of these until it confirms another.
        self._earlier = set(self._folder.versions())
        self._changed, self._polling = threading.Condition(), threading.RLock()
        shared = self._changed, self._over, self._write_status, note
        self._links = [_Link(one, at, *shared) for at, one in enumerate(engines)]
        if self._folder.current is not None:
            self._tell(self._folder.current)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> FollowedVersion | None:
        """The newest version here; `None` before the first."""
        return self._folder.current

    def confirmed(self) -> list[FollowedVersion | None]:
        """Return the version that each engine has confirmed, in the order of the URLs."""
        with self._changed:
            return [link.confirmed for link in self._links]

    def poll(self) -> FollowedVersion | None:
        """Look at the run once; return a newer version once `current` leads to it, else `None`.

        Raises:
            IncompatibleState: The checkpoint has no weights for a file of safetensors.
            IntegrityError: An object is damaged or gone; the folder is unchanged.
            StorageError: The store cannot be read, or the folder not be written.
            Conflict: The follower is closed.
        """
        with self._polling:
            return self._poll()

    def _poll(self) -> FollowedVersion | None:
        self._log.refresh()
        while (record := self._due()) is not None:
            known = self._damage if self._damage and self._damage.n == record.n else None
            if known and _monotonic() < known.again_s:
                raise known.error.with_traceback(None)
            checkpoint = Checkpoint(self._store, self._log, record)
            try:
                view = view_of(checkpoint, self._options)
                check_weights(view, adapters=self._is_call)
                made = self._folder.make(checkpoint, view)
            except IntegrityError as error:
                # Evicted and collected while it was read: there is a newer one.
                is_missing = isinstance(error, MissingObject)
                if is_missing and (
                    self._log.refresh().dropped is not None or checkpoint.is_evicted
                ):
                    continue
                tries = known.tries + 1 if known else 1
                pause_s = min(_LONGEST_DAMAGE_S, _BACKOFF_S * 2.0 ** min(tries - 1, 10))
                self._damage = _Damage(record.n, error, tries, _monotonic() + pause_s)
                raise
            self._damage = None
            HERE.add("engine_fetched_bytes_total", self._folder.moved_bytes)
            self._tell(made)
            return made
        self._damage = None
        return None

    def run(self) -> None:
        """Follow until the run is over and every engine has its last version, or `close` is called.

        A store that is away and a damaged checkpoint are waited out.
        """
        while not self._over.is_set():
            before, self._error = self._error, ""
            try:
                self.poll()
            except (StorageError, IntegrityError, InvalidInput) as error:
                if self.version is None and isinstance(error, InvalidInput):
                    raise
                HERE.fail(error, "follow")
                self._error = str(error)
                if self._error != before:
                    self._note(self._error)
            self._report()
            self._write_status()
            is_over = self._log.run.status in OVER or self._log.run.dropped is not None
            is_over = is_over or not self._follow
            if is_over and not self._error and {*self.confirmed()} == {self.version}:
                return
            if not self._error:
                self._patience.encourage()
            self._patience.wait(over=self._over)

    def close(self) -> None:
        """End the threads, once a version that is being written is there.

        An engine that is loading goes on, and the folder stays.
        """
        if self._over.is_set():
            return
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        for link in self._links:
            link.thread.join(timeout=1.0)
        self._write_status()
        with self._polling, self._changed:
            self._folder.close()

    def _due(self) -> CheckpointRecord | None:
        """Return the checkpoint that the engines get next."""
        run, here = self._log.run, self.version
        if self._monitor is not None:
            found = run.best(self._monitor, self._phase)
        else:
            found = run.latest(self._phase)
        if found is None or (here is not None and found.n == here.n):
            return None
        if here is not None and found.n < here.n and not self._backwards:
            if self._skipped != found.n:
                self._note(f"{here.ref} stays: {found.manifest.short} is older")
            self._skipped = found.n
            return None
        return found

    def _tell(self, version: FollowedVersion) -> None:
        with self._changed:
            for link in self._links:
                link.wanted = version
            self._changed.notify_all()
            needed = [one for link in self._links for one in (link.telling, link.kept)]
            if all(link.kept is not None for link in self._links):
                self._earlier = set()
        # An engine may be reading a version, or take back the one before if a new one fails.
        self._folder.clean(self._earlier | {one.folder for one in (version, *needed) if one})
        self._write_status()

    def _report(self) -> None:
        """Append one entry for all engines, if there is something new and the last one is old."""
        version, (before, at_s) = self.version, self._reported
        if self._streams is None or version is None:
            return
        confirmed = sum(one == version for one in self.confirmed())
        news = (version.id, version.n, confirmed)
        if news == before or _monotonic() - at_s < _REPORT_S:
            return
        self._reported = news, _monotonic()  # a failure too is repeated only after a minute
        entry = {"step": version.step, "id": version.id, "phase": version.phase}
        entry |= {"confirmed": confirmed, "engines": len(self._links), "host": os.uname().nodename}
        try:
            self._streams[STREAM].append(entry)
        except RegistryError as error:
            HERE.fail(error, "follow")
            self._reported = before, _monotonic()
            self._note(f"not reported: {error}")

    def _write_status(self) -> None:
        with self._changed:
            engines = [link.status() for link in self._links]
            about = {"version": self.version and self.version.to_json(), "engines": engines}
            damage = self._damage and self._damage.status()
            self._folder.write_status({**about, "error": self._error or None, "damage": damage})


@dataclass
class _Link:
    """An engine, and the thread that tells it."""

    engine: Engine
    number: int
    changed: threading.Condition
    over: threading.Event
    write_status: Callable[[], None]
    note: Callable[[str], object]
    wanted: FollowedVersion | None = None
    telling: FollowedVersion | None = None
    confirmed: FollowedVersion | None = None
    kept: FollowedVersion | None = None  # the last one that it has confirmed, ever
    confirmed_s: float = 0.0  # by this machine's clock
    error: str = ""

    def __post_init__(self) -> None:
        name = f"holdfast-engine-{self.number}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def status(self) -> dict[str, Any]:
        """Return its entry in the status file."""
        confirmed = self.confirmed and self.confirmed.to_json()
        at = self.confirmed and format_time(int(self.confirmed_s * 1000))
        about = {"engine": self.engine.name, "confirmed": confirmed, "at": at}
        return {**about, "error": self.error or None}

    def _run(self) -> None:
        failures = 0
        while not self.over.is_set():
            with self.changed:
                if self.wanted is None or self.wanted == self.confirmed:
                    self.changed.wait(_ASK_S)
                wanted = self.telling = self.wanted
            try:
                if wanted is not None:
                    self._keep_at(wanted)
                failures = 0
            except Exception as error:  # of a foreign call, too: the others go on
                failures += 1
                self._failed(error)
                longest_s = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2.0 ** min(failures - 1, 10))
                self.over.wait(longest_s * random.uniform(0.5, 1))

    def _keep_at(self, version: FollowedVersion) -> None:
        """Have the engine load a version, unless it has it: it may have been started again."""
        if self.over.is_set():
            return
        loaded = self.engine.loaded()
        if loaded != version.id and (loaded is not None or self.confirmed != version):
            self.engine.tell(version)
            loaded = self.engine.loaded()
            if loaded not in (None, version.id):
                what, found = "the engine says that it has other weights", quoted(loaded)[:200]
                raise RegistryError(what, where=self.engine.name, expected=version.id, found=found)
        elif self.confirmed == version:
            return
        else:  # told by a try that failed at its end, or by a follower that was killed
            self.engine.resume()
        self._unconfirm()
        now_s = time.time()
        with self.changed:
            self.confirmed = self.kept = version
            self.confirmed_s, self.error = now_s, ""
        self.write_status()
        HERE.put("engine_confirmed_info", 1, engine=self.number, id=version.id)
        HERE.put("engine_confirmed_timestamp_seconds", now_s, engine=self.number)
        self.note(f"{self.engine.name} has {version.ref}  {version.id[:12]}")

    def _failed(self, error: Exception) -> None:
        self._unconfirm()
        if str(error) != self.error:
            self.note(f"{self.engine.name}: {error}")
        self.error = str(error)
        self.write_status()
        HERE.add("engine_failures_total", engine=self.number)

    def _unconfirm(self) -> None:
        """Forget what the engine has confirmed: it may have other weights."""
        with self.changed:
            if self.confirmed is not None:
                HERE.put("engine_confirmed_info", None, engine=self.number, id=self.confirmed.id)
            self.confirmed = None
