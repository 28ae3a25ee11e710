"""Signatures of the heads of runs: a file for each commit and key, beside the logs.

The digest of a commit covers all commits before it, so one signature vouches for all of them. A
signature is no part of the log: whoever vouches need not be able to write to the run, and programs
that do not know signatures read the log as ever. Specified in docs/spec.md, section 48.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

from holdfast.registry.errors import Conflict, Malformed, RegistryError
from holdfast.registry.history.actions import Commit, line_digest
from holdfast.registry.objects import (
    SIGNATURES,
    SignatureKey,
    join_lines,
    signatures_prefix,
    split_lines,
)
from holdfast.registry.store import Store
from holdfast.registry.values import Digest, DigestField, Field, Record, canonical

if TYPE_CHECKING:  # it imports `cryptography`
    from holdfast.registry.history.signing_keys import PublicKey, SigningKey

_LOGGER = logging.getLogger("holdfast")


class Signature(Record):
    """A signature: the owner of a key vouches for a commit, and for all commits before it."""

    format: Literal["holdfast.signature/1"] = "holdfast.signature/1"
    run: str
    n: Annotated[int, Field(ge=0)]  # the number of the commit
    digest: DigestField  # of its line
    key: DigestField  # id of the public key
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]  # Ed25519

    @property
    def message(self) -> bytes:
        """The bytes that are signed: all fields but the signature."""
        return canonical.encode(self.to_json(without=("signature",)))

    def is_by(self, key: PublicKey) -> bool:
        """Return whether the owner of this key has made it."""
        return self.key == key.id and key.has_signed(self.message, bytes.fromhex(self.signature))

    @classmethod
    def read(cls, data: bytes, key: SignatureKey) -> Signature:
        """Read the file of a signature."""
        where = str(key)
        lines = split_lines(data, where=where)
        found = cls.decode(lines[0], where=where)
        if len(lines) != 1 or (found.run, found.n, found.key) != (key.run_id, key.n, key.key):
            raise Malformed("a signature under another name", where=where)
        return found


def sign_commit(store: Store, key: SigningKey, run_id: str, n: int, digest: Digest) -> bool:
    """Sign a commit; return whether that is new."""
    where = SignatureKey(run_id, n, key.public.id)
    made = Signature(run=run_id, n=n, digest=digest, key=key.public.id, signature="0" * 128)
    made = made.changed(signature=key.sign(made.message).hex())
    data = join_lines([made.encode()])
    if store.backend.put_if_absent(str(where), data):
        return True
    if store.backend.get(str(where)) != data:
        raise Conflict(
            "another file has the name of this signature",
            where=where,
            hint="Somebody has put it there, or this key has signed another history of the run: "
            "see `holdfast verify --signed`.",
        )
    return False


def signatures_of(store: Store, run_id: str | None = None) -> Iterator[SignatureKey]:
    """Yield the names of the signatures of a run, or of all runs; skip files of other names."""
    prefix = SIGNATURES if run_id is None else signatures_prefix(run_id)
    for info in store.backend.list(prefix):
        with suppress(Malformed):  # `verify` reports it
            yield SignatureKey.parse(info.key)


class CommitSigner:
    """Signs each commit of a handle, right after it. A key is loaded before the first write."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._key: SigningKey | None = None

    def prepare(self) -> None:
        """Load the key, so that a wrong one is refused before anything is written."""
        from holdfast.registry.history.signing_keys import SigningKey

        self._key = self._key or SigningKey.load(self._source)

    def sign(self, store: Store, raw: bytes, commit: Commit) -> None:
        """Sign a commit that has landed; if that fails, the next signature covers it."""
        self.prepare()
        assert self._key is not None
        try:
            sign_commit(store, self._key, commit.run, commit.n, line_digest(raw))
        except RegistryError as error:
            _LOGGER.warning("%s: commit %d is not signed: %s", commit.run, commit.n, error)
