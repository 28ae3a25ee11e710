"""Keys that sign, and keys that a reader trusts. The only module that imports `cryptography`.

A key that signs is named by the user alone: a file, a variable of the environment, or a command
(an agent) that has the key. No registry, preset or folder can name one. Specified in docs/spec.md,
section 48.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.backends.errors import install_extra
from holdfast.registry.errors import InvalidInput
from holdfast.registry.values import Digest

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import (
        ECDSA,
        SECP256R1,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
        load_pem_public_key,
    )
except ModuleNotFoundError as error:
    raise InvalidInput(
        "signatures need a library that is not installed",
        found=error,
        hint=install_extra("sign"),
    ) from error

Kind = Literal["Ed25519", "ECDSA"]
#: A file of keys is not longer.
_MOST_BYTES = 1 << 20
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)
#: Seconds for which an agent may take to answer: it may ask a person.
_AGENT_S = 60
_UNREADABLE = (TypeError, ValueError, UnsupportedAlgorithm)  # what a PEM that is no key raises
_HINT = "docs/security.md shows how to make keys."


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key, and the name under which the user keeps it."""

    name: str  # the name of its file without the ending
    key: Ed25519PublicKey | EllipticCurvePublicKey

    @classmethod
    def of(cls, key: object, where: str, kind: Kind) -> PublicKey:
        """Check the kind of a key."""
        is_ecdsa = isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)
        if is_ecdsa if kind == "ECDSA" else isinstance(key, Ed25519PublicKey):
            return cls(Path(where).stem, key)  # type: ignore[arg-type]  # it is one of them
        raise InvalidInput(
            "the key is of another kind",
            where=where,
            expected="ECDSA on P-256" if kind == "ECDSA" else kind,
            found=type(key).__name__,
            hint=f"Runs are signed with Ed25519, exports with ECDSA. {_HINT}",
        )

    @classmethod
    def parse(cls, pem: bytes, where: str, kind: Kind = "Ed25519") -> PublicKey:
        """Read a public key in PEM."""
        try:
            key = load_pem_public_key(pem)
        except _UNREADABLE as error:
            raise InvalidInput("not a public key", where=where, found=error, hint=_HINT) from error
        return cls.of(key, where, kind)

    @property
    def id(self) -> Digest:
        """The SHA-256 of the key as DER (SubjectPublicKeyInfo)."""
        return Digest.of(self.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))

    @property
    def pem(self) -> bytes:
        """The key in PEM."""
        return self.key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Return whether the owner of this key has signed a message."""
        try:
            if isinstance(self.key, Ed25519PublicKey):
                self.key.verify(signature, message)
            else:
                self.key.verify(signature, message, ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key, or an agent that has one."""

    source: str  # as the user named it
    public: PublicKey
    _sign: Callable[[bytes], bytes]

    @classmethod
    def load(cls, source: str, kind: Kind = "Ed25519") -> SigningKey:
        """Load the key that a user names: a file of PEM, `env:VARIABLE` or `agent:COMMAND`."""
        if "-----BEGIN" in source:  # and not repeated: logs would have it
            what, expected = "a key in place of where it is", "FILE, env:VARIABLE or agent:COMMAND"
            raise InvalidInput(what, expected=expected, hint=_HINT)
        scheme, colon, rest = source.partition(":")
        if colon and scheme == "agent":
            words = _words(source, rest)
            public = PublicKey.parse(_ask(words, "public"), source, kind)
            return cls(source, public, lambda message: b64decode(_ask(words, "sign", message)))
        pem = os.fsencode(os.environ.get(rest, "")) if colon and scheme == "env" else _read(source)
        try:
            key = load_pem_private_key(pem, password=None)
        except _UNREADABLE as error:
            raise InvalidInput(
                "not a private key that can be used",
                where=source,
                expected="an unencrypted private key in PEM",
                found=error,
                hint=f"An agent can open an encrypted one. {_HINT}",
            ) from error
        public = PublicKey.of(key.public_key(), source, kind)
        more = () if kind == "Ed25519" else (ECDSA(SHA256()),)
        return cls(source, public, lambda message: key.sign(message, *more))  # type: ignore[union-attr]  # its kind is checked

    def sign(self, message: bytes) -> bytes:
        """Sign a message, and check the result: an agent may use another key."""
        try:
            signature = self._sign(message)
        except ValueError as error:  # no base64
            raise _failed(self.source, error) from error
        if not self.public.has_signed(message, signature):
            raise _failed(self.source, "a signature that its public key refuses")
        return signature


def trusted_keys(sources: Iterable[str | os.PathLike[str]]) -> dict[Digest, PublicKey]:
    """Read the keys that a reader trusts, by id: files of PEM, and folders of `*.pem`."""
    paths = [Path(one) for one in sources]
    files = [sorted(path.glob("*.pem")) if path.is_dir() else [path] for path in paths]
    pems = [
        (pem, str(one)) for group in files for one in group for pem in _PUBLIC.findall(_read(one))
    ]
    if not pems:
        where = ", ".join(map(str, paths))
        raise InvalidInput("no public keys", where=where, expected="PEM", hint=_HINT)
    keys = [PublicKey.parse(pem, where) for pem, where in pems]
    return {key.id: key for key in keys}


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise InvalidInput(
            "the key cannot be read",
            where=path,
            expected="a file of PEM; of a key that signs also env:VARIABLE or agent:COMMAND",
            found=error.strerror or error,
        ) from error


def _words(source: str, command: str) -> list[str]:
    try:
        if words := shlex.split(command):
            return words
        raise ValueError("no command")
    except ValueError as error:
        raise _failed(source, error) from error


def _ask(words: list[str], what: Literal["public", "sign"], message: bytes = b"") -> bytes:
    """Ask an agent: `COMMAND public` prints a key in PEM, `COMMAND sign` signs its input."""
    name = shlex.join([*words, what])
    try:
        done = subprocess.run(
            [*words, what], input=message, capture_output=True, timeout=_AGENT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()[-200:]
        raise _failed(name, f"exit status {error.returncode}: {said}") from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise _failed(name, error) from error
    return done.stdout


def _failed(where: str, found: object) -> InvalidInput:
    return InvalidInput(
        "nothing was signed",
        where=where,
        expected="`COMMAND public` prints a key in PEM, `COMMAND sign` reads what to sign and "
        "prints the signature in base64",
        found=found,
    )
