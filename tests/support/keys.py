"""Keys that sign, and their public halves, as files."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

#: Signs the golden registry `signed`, so it is the same whenever that is made.
GOLDEN_KEY = bytes(range(32))


def write_key(
    folder: Path,
    name: str,
    key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey | None = None,
    password: bytes | None = None,
) -> str:
    """Write a key as `NAME.key`, and its public half as `trusted-NAME/NAME.pem`; return the key."""
    key = key or Ed25519PrivateKey.generate()
    closing: KeySerializationEncryption = NoEncryption()
    if password is not None:
        closing = BestAvailableEncryption(password)
    public = folder / f"trusted-{name}" / f"{name}.pem"
    public.parent.mkdir(parents=True)
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    private = folder / f"{name}.key"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, closing))
    return str(private)
