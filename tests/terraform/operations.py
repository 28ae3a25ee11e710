"""Who may do what: the table that the policies are tried against, and that the README shows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from tests.terraform.judges import ADMINISTRATOR, PREFIX, World, client

ROLES = ("trainer", "evaluator", "annotator", "collector", "operator", ADMINISTRATOR)

#: With a client, to a key of a bucket.
Act = Callable[[Any, str, str], object]


@dataclass(frozen=True)
class Operation:
    """A row of the table.

    Attributes:
        name: As the README has it.
        by: Who may.
        acts: What is done, each to each key.
        keys: Under the prefix, unless they begin with a slash; NEW becomes another word each time.
        conditional: Whether a refusal hangs on a condition, or on a `?`, which moto does not know.
        tls: False for a request without it.
        spoils: Whether the bucket is another one afterwards.
    """

    name: str
    by: str
    acts: tuple[Act, ...]
    keys: tuple[str, ...]
    conditional: bool = False
    tls: bool = True
    spoils: bool = False

    def may(self, role: str) -> bool:
        return role in self.by.split()

    def attempts(self, world: World, role: str) -> Iterator[Callable[[], None]]:
        """Yield every act on every key as a call that raises `ClientError` where it is refused."""
        for key in self.keys:
            for act in self.acts:
                yield partial(self._attempt, world, role, act, key)

    def _attempt(self, world: World, role: str, act: Act, key: str) -> None:
        server = world.roles[role]
        key = f"{PREFIX}/{key}" if key[0] != "/" else key[1:]
        key = key.replace("NEW", secrets.token_hex(10))
        endpoint = server.endpoint_url
        if not self.tls:
            endpoint = endpoint.replace("127.0.0.1", "localhost")
        # Whoever is refused is refused before S3 looks what is there.
        if self.may(role) and act is not _create:
            _create(client(world.owner), world.bucket, key)
        act(client(server, endpoint_url=endpoint), world.bucket, key)


def _create(s3: Any, bucket: str, key: str) -> None:
    try:
        s3.put_object(Bucket=bucket, Key=key, Body=b"before", IfNoneMatch="*")
    except ClientError as error:
        # There is one registry.json only. Whoever is told this was not refused.
        if error.response["Error"]["Code"] != "PreconditionFailed":
            raise


def _replace(s3: Any, bucket: str, key: str) -> None:
    s3.put_object(Bucket=bucket, Key=key, Body=b"after")


def _encrypt(s3: Any, bucket: str, key: str) -> None:
    s3.put_object(Bucket=bucket, Key=key, Body=b"x", IfNoneMatch="*", **_OWN_KEY)


def _encrypt_parts(s3: Any, bucket: str, key: str) -> None:
    s3.create_multipart_upload(Bucket=bucket, Key=key, **_OWN_KEY)


def _encrypt_elsewhere(s3: Any, bucket: str, key: str) -> None:
    key_id = "arn:aws:kms:eu-central-1:210987654321:key/1"
    given = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key_id}
    s3.put_object(Bucket=bucket, Key=key, Body=b"x", IfNoneMatch="*", **given)


def _begin_parts(s3: Any, bucket: str, key: str) -> None:
    s3.create_multipart_upload(Bucket=bucket, Key=key)


def _read(s3: Any, bucket: str, key: str) -> None:
    assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == b"before"
    assert s3.head_object(Bucket=bucket, Key=key)["ContentLength"] == len(b"before")


def _list(s3: Any, bucket: str, key: str) -> None:
    folder = key.rpartition("/")[0] + "/"
    found = s3.list_objects_v2(Bucket=bucket, Prefix=folder)
    assert key in [entry["Key"] for entry in found["Contents"]]


def _use(s3: Any, bucket: str, key: str) -> None:
    _list(s3, bucket, key)
    _read(s3, bucket, key)
    # Whoever may list is told that something is absent.
    with suppress(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket=bucket, Key=f"{key}-absent")


def _list_all(s3: Any, bucket: str, key: str) -> None:
    s3.list_objects_v2(Bucket=bucket)


def _delete(s3: Any, bucket: str, key: str) -> None:
    s3.delete_object(Bucket=bucket, Key=key)


def _delete_version(s3: Any, bucket: str, key: str) -> None:
    s3.delete_object(Bucket=bucket, Key=key, VersionId="null")


def _ask_versioning(s3: Any, bucket: str, key: str) -> None:
    s3.get_bucket_versioning(Bucket=bucket)


def _ask_for_archived(s3: Any, bucket: str, key: str) -> None:
    with suppress(s3.exceptions.InvalidObjectState):  # allowed, but this one is in no archive
        s3.restore_object(Bucket=bucket, Key=key, RestoreRequest={"Days": 1})


def _change_policy(s3: Any, bucket: str, key: str) -> None:
    s3.delete_bucket_policy(Bucket=bucket)


def _change_lifecycle(s3: Any, bucket: str, key: str) -> None:
    rule = {"ID": "all", "Status": "Enabled", "Filter": {}, "Expiration": {"Days": 1}}
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})


def _change_versioning(s3: Any, bucket: str, key: str) -> None:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})


_OWN_KEY = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}
_ALL = " ".join(ROLES)
# Runs named like the folders that the policies speak of.
_SLOT = ("runs/a.b-c/log/NEW", "runs/log/log/NEW", "runs/snapshots/log/NEW")
_SNAPSHOT = ("runs/a.b-c/snapshots/NEW", "runs/log/snapshots/NEW")
_OBJECT = ("packs/aa/NEW.0", "manifests/aa/NEW.0", "placements/aa/NEW.0")
_MARKER = ("active/a.b-c.NEW",)
_SIGNATURE = ("signatures/a.b-c/NEW",)
_EPOCH = ("epochs/NEW", "sweeps/aa/NEW", "notes/NEW")
_CONFIG = ("registry.json",)
_PROBE = (".probe/NEW/0000", ".probe/clock-NEW")
_REST = (
    "registry.json.NEW",
    "runs/a/logs/NEW",
    "packs-NEW",
)
_ELSEWHERE = ("/teams/packs/aa/NEW.0", "/packs/aa/NEW.0")
_HISTORY = (*_SLOT, *_EPOCH, *_SIGNATURE, *_CONFIG)
_EACH = (*_SLOT[:1], *_SNAPSHOT[:1], *_OBJECT, *_EPOCH, *_CONFIG)
_PUT = (_create, _replace)
_OVERWRITE = (_replace, _begin_parts)

OPERATIONS = (
    Operation("list and read the registry", _ALL, (_use,), _EACH),
    Operation(
        "list outside the prefix",
        ADMINISTRATOR,
        (_list, _list_all),
        _ELSEWHERE,
        conditional=True,
    ),
    Operation("read outside the prefix", ADMINISTRATOR, (_read,), _ELSEWHERE),
    Operation(
        "put a slot where none is",
        f"trainer annotator collector {ADMINISTRATOR}",
        (_create,),
        _SLOT,
    ),
    # By the format a slot may hold any action, and S3 does not look into it.
    Operation(
        "drop, prune, rewind or take over any run",
        f"trainer annotator collector {ADMINISTRATOR}",
        (_create,),
        _SLOT,
    ),
    Operation(
        "put a signature where none is",
        f"trainer annotator collector {ADMINISTRATOR}",
        (_create,),
        _SIGNATURE,
    ),
    Operation("put an epoch where none is", f"collector {ADMINISTRATOR}", (_create,), _EPOCH),
    Operation(
        "put `registry.json` where none is", f"operator {ADMINISTRATOR}", (_create,), _CONFIG
    ),
    Operation(
        "replace a slot, an epoch, a signature or `registry.json`",
        "",
        _OVERWRITE,
        _HISTORY,
        conditional=True,
    ),
    Operation("delete a slot, an epoch, a signature or `registry.json`", "", (_delete,), _HISTORY),
    Operation("delete a version of one of these", "", (_delete_version,), _HISTORY),
    Operation(
        "put or replace a pack, manifest or placement",
        f"trainer collector {ADMINISTRATOR}",
        _PUT,
        _OBJECT,
    ),
    Operation(
        "delete a pack, manifest or placement", f"collector {ADMINISTRATOR}", (_delete,), _OBJECT
    ),
    Operation(
        "ask for an archived pack",
        f"collector {ADMINISTRATOR}",
        (_ask_for_archived,),
        _OBJECT[:1],
    ),
    Operation(
        "put or replace a snapshot",
        f"trainer annotator collector {ADMINISTRATOR}",
        _PUT,
        _SNAPSHOT,
    ),
    Operation("delete a snapshot", f"collector {ADMINISTRATOR}", (_delete,), _SNAPSHOT),
    Operation(
        "put a marker of a sealed run",
        f"trainer annotator collector {ADMINISTRATOR}",
        _PUT,
        _MARKER,
    ),
    Operation("delete a marker of a sealed run", f"collector {ADMINISTRATOR}", (_delete,), _MARKER),
    Operation(
        "put, replace or delete under `.probe/`",
        f"collector operator {ADMINISTRATOR}",
        (*_PUT, _delete),
        _PROBE,
    ),
    Operation(
        "put, replace or delete anything else",
        ADMINISTRATOR,
        (*_PUT, _delete),
        (*_REST, *_ELSEWHERE),
    ),
    Operation(
        "put, replace or delete a file of another name among slots or snapshots",
        ADMINISTRATOR,
        (*_PUT, _delete),
        ("runs/a/log/junk-NEW", "runs/a/snapshots/NEW0"),
        conditional=True,
    ),
    Operation(
        "delete a version of anything else",
        ADMINISTRATOR,
        (_delete_version,),
        (*_OBJECT, *_SNAPSHOT, *_PROBE, *_REST[:1]),
    ),
    Operation(
        "ask whether the bucket keeps versions",
        f"collector {ADMINISTRATOR}",
        (_ask_versioning,),
        _CONFIG,
    ),
    Operation(
        "change the bucket's settings",
        ADMINISTRATOR,
        (_change_versioning, _change_lifecycle, _change_policy),
        _CONFIG,
        spoils=True,
    ),
    Operation(
        "put anything under a key of one's own or another KMS key",
        "",
        (_encrypt, _encrypt_parts, _encrypt_elsewhere),
        (*_OBJECT, *_SLOT[:1], *_SNAPSHOT[:1]),
        conditional=True,
    ),
    Operation(
        "anything without TLS", "", (_list, _read, *_PUT), _OBJECT, conditional=True, tls=False
    ),
)
