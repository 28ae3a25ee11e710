"""Check who vouches for which commits of each run, by the keys that a reader trusts.

The keys that count, and the demand that there are signatures, come from the reader. Nothing on the
store says whom to trust, or that a run should be signed. Specified in docs/spec.md, section 48.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from holdfast.registry import history as history_room
from holdfast.registry.errors import IntegrityError, InvalidInput, ObjectNotFound
from holdfast.registry.history import Signature, signatures_of
from holdfast.registry.objects import SignatureKey
from holdfast.registry.store import Store
from holdfast.registry.upkeep.findings import Finding, Vouched
from holdfast.registry.upkeep.histories import Asked, History, read_history
from holdfast.registry.values import Digest

#: Files or folders with the keys that a reader trusts.
Keys = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
#: Seconds that the signature of the newest commit may take: it is put after its commit.
_SETTLES_S = 1.0
_REPLACED = (
    "Somebody replaced the log, or this key has signed two histories: find out which one is right, "
    "and restore it from a backup or a mirror."
)
_GONE = "Somebody deleted or replaced the log: restore it from a backup or a mirror."


class SignatureCheck:
    """The signatures by keys that a reader trusts; made before the logs are read."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        paths = [keys] if isinstance(keys, str | os.PathLike) else list(keys)
        self._refuse_own(paths)
        self._keys = history_room.trusted_keys(paths)  # loads the library of the extra `sign`
        self._signed: dict[str, list[SignatureKey]] = {}
        for key in signatures_of(store):
            self._note(key)
        self._histories: dict[str, History] = {}
        self.vouched: list[Vouched] = []  # by run, once `check` has been called

    def _refuse_own(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Refuse keys that lie in the registry: whoever writes to it could choose them."""
        url = self._store.backend.url  # of a bucket: no path that exists
        root = Path(url.removeprefix("file://")).resolve()
        for path in paths:
            if Path(path).resolve().is_relative_to(root):
                raise InvalidInput(
                    "the trusted keys lie in the registry that they are to check",
                    where=path,
                    hint="Keep the keys where no writer of the registry can change them.",
                )

    def _note(self, key: SignatureKey) -> bool:
        signed = self._signed.setdefault(key.run_id, [])
        if key.key not in self._keys or key in signed:
            return False
        signed.append(key)
        return True

    def commits_of(self, run_id: str) -> frozenset[int]:
        """Return the numbers of commits after which the link of a run is needed."""
        return frozenset(key.n + 1 for key in self._signed.get(run_id, ()))

    def take(self, history: History) -> None:
        """Take a run that was read."""
        self._histories[history.run_id] = replace(history, needs=(), kept=None)

    def check(self) -> Iterator[Finding]:
        """Yield what is not signed, and signatures that another log must have had."""
        self.vouched = []
        for run_id in sorted(self._signed.keys() - self._histories.keys()):
            last = max((key for key in self._signed[run_id]), default=None)
            if last is not None:
                message = f"the run is gone; {self._name(last)} has signed commit {last.n} of it"
                yield Finding("signature", run_id, message, (run_id,), _GONE)
        for history, findings, vouched in self._check_runs():
            yield from findings
            self.vouched += vouched
            most = max((one.commits for one in vouched), default=0)
            if most < history.commits:
                yield self._unsigned(history, most)

    def _unsigned(self, history: History, most: int) -> Finding:
        last = history.commits - 1
        which = f"commit {last} is" if most == last else f"commits {most} to {last} are"
        message = f"{which} not signed by a trusted key"
        advice = f"If they are right: `holdfast sign {history.run_id} --key KEY`."
        return Finding("signature", history.run_id, message, (history.run_id,), advice)

    def _check_runs(self) -> Iterator[tuple[History, list[Finding], list[Vouched]]]:
        """Yield each run with what is wrong with its signatures, and who vouches for it."""
        found = {run_id: self._read_run(one) for run_id, one in self._histories.items()}
        late = {
            run_id
            for run_id, (_, vouched) in found.items()
            if max((one.commits for one in vouched), default=0) + 1
            == self._histories[run_id].commits
        }
        if late:  # only newest commits have none: perhaps their authors were just about to sign
            time.sleep(_SETTLES_S)
            late &= {key.run_id for key in signatures_of(self._store) if self._note(key)}
        for run_id, history in sorted(self._histories.items()):
            if run_id in late:
                wanted = self.commits_of(run_id) | {history.commits}
                later = read_history(self._store, Asked(run_id, commits=wanted))
                if history.head and later.links.get(history.commits) == history.head.head:
                    found[run_id] = self._read_run(later, history.commits)
            yield history, *found[run_id]

    def _read_run(
        self, history: History, least: int | None = None
    ) -> tuple[list[Finding], list[Vouched]]:
        """Read the newest signatures of each key, down to one that fits the log.

        Of a log that has grown meanwhile only the first `least` commits have to be signed.
        """
        findings, vouched = list[Finding](), list[Vouched]()
        of = history.commits if least is None else least
        for id_ in self._keys:
            keys = [key for key in self._signed.get(history.run_id, ()) if key.key == id_]
            contradicts = False
            for key in sorted(keys, reverse=True):
                fault, digest = self._read(key)
                if fault is not None:
                    findings.append(fault)
                elif history.links.get(key.n + 1) == digest:
                    commits = min(key.n + 1, of)
                    vouched.append(Vouched(history.run_id, self._name(key), id_, commits, of))
                    break
                elif not contradicts:
                    contradicts = True
                    findings.append(self._contradiction(history, key))
        return findings, sorted(vouched, key=lambda one: (-one.commits, one.name))

    def _contradiction(self, history: History, key: SignatureKey) -> Finding:
        name, run_id = self._name(key), history.run_id
        if key.n >= history.commits:
            message = f"{name} has signed commit {key.n}, and the log has {history.commits} commits"
            return Finding("signature", run_id, f"{message}: its end is gone", (run_id,), _GONE)
        message = f"commit {key.n} is not the one that {name} has signed"
        return Finding("signature", run_id, message, (run_id,), _REPLACED)

    def _read(self, key: SignatureKey) -> tuple[Finding | None, Digest | None]:
        """Return the digest that a signature covers, or what is wrong with it."""
        try:
            found = Signature.read(self._store.backend.get(str(key)), key)
        except (IntegrityError, ObjectNotFound) as error:
            return self._bad(key, error.summary), None
        if not found.is_by(self._keys[key.key]):
            return self._bad(key, f"not signed by {self._name(key)}"), None
        return None, found.digest

    def _bad(self, key: SignatureKey, message: str) -> Finding:
        advice = "It proves nothing, and the other signatures count: move it away."
        return Finding("signature", str(key), message, advice=advice, severity="note")

    def _name(self, key: SignatureKey) -> str:
        return self._keys[key.key].name
