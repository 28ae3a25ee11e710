"""The store in an S3 bucket, over the core of boto3 (why: `docs/design/s3-transport.md`).

`put_if_absent` is a PUT with `If-None-Match: *`. If the answer to a PUT is lost, the PUT is
repeated, and the store refuses the repeat if the first one created the object. So False can mean
that the object holds the caller's own bytes. A caller who must know reads the object.

Credentials, profile, region and endpoint come from the usual AWS environment, the last two also
from the URL. With `HOLDFAST_S3_BUCKET_OWNER` (an account id), every request to a bucket of another
owner fails. The role needs ListBucket besides GetObject: without it S3 answers 403 for an absent
object, and this backend never guesses absence.
"""

from __future__ import annotations

import base64
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from botocore.exceptions import ClientError

from holdfast.backends.base import (
    Backend,
    Body,
    ByteRange,
    ObjectInfo,
    as_buffers,
    check_into,
    check_key,
    truncated,
)
from holdfast.backends.errors import (
    AccessDenied,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
    StoreUnsuitable,
)
from holdfast.backends.limits import check_whole
from holdfast.backends.location import Location
from holdfast.backends.patience import TIMEOUT, Attempts, Patience, patience_of_environment
from holdfast.backends.s3.body import SendBody, fill
from holdfast.backends.s3.client import make_client
from holdfast.backends.s3.errors import error_code, is_absent, of_object, translated
from holdfast.backends.s3.proof import (
    NotProven,
    check_all_deleted,
    check_copied,
    check_deleted,
    check_found,
    check_got,
    check_page,
    check_written,
)
from holdfast.backends.s3.settings import BUCKET_OWNER, KEEPS, READ_AT_ONCE, S3Settings
from holdfast.backends.secrets import Secrets, hidden
from holdfast.backends.waiting import Wait, waiting

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

_T = TypeVar("_T")

_WRITES = ("put", "delete")
_PAGE = 1000
# The most objects that S3 deletes by one request.
_DELETES = 1000
# A body up to this size is joined and sent right after its headers. Before a larger one the SDK
# asks the store (Expect: 100-continue), so that a refused conditional put uploads nothing.
_SMALL_BYTES = 64 * 1024

_open: WeakSet[S3Backend] = WeakSet()

#: A browser shows an object as a page only if the store says that it is one.
_PAGE_TYPE: dict[str, Any] = {"ContentType": "text/html; charset=utf-8"}


class S3Backend(Backend):
    """Objects of a bucket under a prefix.

    Nothing can be left unfinished: each object is one PUT, never an upload of parts.

    Args:
        location: The bucket, and options for the client.
        patience: How long to wait; from the environment if `None`.
        settings: Credentials and options; from the usual AWS environment if `None`.
    """

    concurrency = 16
    archives = frozenset({"GLACIER", "DEEP_ARCHIVE"})
    storage_classes = archives | READ_AT_ONCE

    def __init__(
        self,
        location: Location,
        patience: Patience | None = None,
        settings: S3Settings | None = None,
    ) -> None:
        self._location = location
        self._settings = settings or S3Settings()
        self._bucket = location.name
        self._prefix = f"{location.path}/" if location.path else ""
        owner = os.environ.get(BUCKET_OWNER)
        self._owner: dict[str, Any] = {"ExpectedBucketOwner": owner} if owner else {}
        self._always = {**self._owner, **self._settings.requests}
        self._patience = patience or patience_of_environment()
        # Before the first answer there is less patience, so that a wrong address is reported soon.
        self._answered = False
        self._deletes_many = True
        self._made: S3Client | None = None
        self._lock = threading.Lock()
        _open.add(self)

    @property
    def url(self) -> str:
        """`s3://BUCKET/PREFIX`, with the endpoint if the URL named one."""
        return self._location.url

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        views = check_into(byte_range, into)
        named = self._object(key)
        if byte_range is not None:
            named["Range"] = f"bytes={byte_range.start}-{byte_range.stop - 1}"

        def ask(wait: Wait) -> bytes:
            answer = self._client().get_object(**named)
            with closing(answer["Body"]) as stream:
                size = check_got(*_head(answer), byte_range)
                if byte_range is None:
                    check_whole(size, self._where(key))
                    wait.expects(size)
                elif size < len(byte_range):
                    raise truncated(self._where(key), byte_range.stop, byte_range.start + size)
                if into is None:
                    # The SDK's stream checks that all announced bytes come.
                    return stream.read()
                fill(stream, views)
            return b""

        return self._ask("get", key, ask, 0 if byte_range is None else len(byte_range))

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object, atomically and durably."""
        buffers = as_buffers(body)
        self._ask("put", key, lambda wait: self._put(key, buffers, {}, wait), _size(buffers))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; False may mean that its own answer was lost."""
        buffers = as_buffers(body)

        def ask(wait: Wait) -> bool:
            try:
                self._put(key, buffers, {"IfNoneMatch": "*"}, wait)
            except ClientError as error:
                if error_code(error) == "PreconditionFailed":
                    return False
                raise
            except NotProven:
                # Only the store knows whether it made the object. If it did not, send it again.
                if self._listed(key):
                    return False
                raise
            return True

        return self._ask("put", key, ask, _size(buffers))

    def stat(self, key: str) -> ObjectInfo:
        """Return key, size and time of an object."""

        def ask(_: Wait) -> ObjectInfo:
            try:
                found = self._client().head_object(**self._object(key))
            except ClientError as error:
                if error_code(error) != "404":
                    raise
                # The answer to HEAD has no body, so it does not prove who answered.
                if self._listed(key):
                    raise NotProven("HTTP 404 for an object that the store lists") from error
                raise ObjectNotFound("no such object", where=self._where(key)) from error
            check_found(*_head(found))
            made_s = found["LastModified"].timestamp()
            is_archived = found.get("StorageClass") in self.archives
            return ObjectInfo(key, found["ContentLength"], made_s, is_archived)

        return self._ask("stat", key, ask)

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order."""
        query: dict[str, Any] = {"Prefix": self._prefix + prefix}
        if start_after:
            query["StartAfter"] = self._prefix + start_after
        if delimiter:
            query["Delimiter"] = "/"
        last = start_after
        left = limit
        while left is None or left > 0:
            page = self._page(query, left)
            for info in self._entries(page):
                # S3 sorts a folder after the keys within it, and a page may come twice.
                if info.key > last and (left is None or left > 0):
                    last = info.key
                    left = None if left is None else left - 1
                    yield info
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = self._next_page(page, query)

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""

        def ask(_: Wait) -> None:
            try:
                answer = self._client().delete_object(**self._object(key))
            except ClientError as error:
                if not is_absent(error):
                    raise
            else:
                check_deleted(*_head(answer))

        self._ask("delete", key, ask)

    def delete_many(self, keys: Iterable[str]) -> Mapping[str, StorageError]:
        """Remove objects by requests of 1,000 keys; the store must answer for each key."""
        failed: dict[str, StorageError] = {}
        waiting = iter(keys)
        while batch := list(islice(waiting, _DELETES)):
            failed |= self._delete_batch(batch)
        return failed

    def _delete_batch(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        left = {self._prefix + check_key(key): key for key in keys}
        failed: dict[str, StorageError] = {}

        def ask(_: Wait) -> None:
            answer = self._client().delete_objects(
                Bucket=self._bucket,
                Delete={"Objects": [{"Key": name} for name in left]},
                **self._always,
            )
            errors = {
                name: of_object(code, said, self._where(left[name]))
                for name, (code, said) in check_all_deleted(answer, left).items()
            }
            again = {n: left[n] for n, e in errors.items() if isinstance(e, StoreUnavailable)}
            failed.update((left[name], e) for name, e in errors.items() if name not in again)
            left.clear()
            left.update(again)
            if again:
                raise errors[next(iter(again))]

        try:
            if self._deletes_many:
                self._ask("delete", "", ask)
                return failed
        except StorageError as error:
            if type(error) not in (StorageError, StoreUnsuitable):
                raise
            # Some servers have no such request, among them Google's for programs of S3.
            self._deletes_many = False
        return super().delete_many(keys)

    def move_to_class(self, key: str, storage_class: str) -> None:
        """Copy an object onto itself in another storage class."""
        if storage_class not in self.storage_classes:
            return super().move_to_class(key, storage_class)
        named = self._object(key)
        asked: dict[str, Any] = {
            **named,
            **self._settings.puts,
            "CopySource": {"Bucket": named["Bucket"], "Key": named["Key"]},
            "StorageClass": storage_class,
            "MetadataDirective": "COPY",
        }

        def ask(_: Wait) -> None:
            check_copied(self._client().copy_object(**asked))

        return self._ask("put", key, ask)

    def restore(self, key: str, days: int) -> None:
        """Ask S3 to make an archived object readable for some days, at the standard speed."""
        named = self._object(key)
        wanted: Any = {"Days": days, "GlacierJobParameters": {"Tier": "Standard"}}

        def ask(_: Wait) -> None:
            try:
                self._client().restore_object(**named, RestoreRequest=wanted)
            except ClientError as error:
                if error_code(error) != "RestoreAlreadyInProgress":
                    raise

        self._ask("put", key, ask)

    def keeps_versions(self) -> bool | None:
        """Return whether the bucket keeps versions; None if this role may not know.

        None also if versioning is suspended: then a deleted object is kept as a version if it was
        put before the suspension, and not if it was put later.
        """
        try:
            found = self._ask(
                "versioning",
                "",
                lambda _: self._client().get_bucket_versioning(Bucket=self._bucket, **self._owner),
            )
        except (AccessDenied, StoreUnsuitable):
            return None
        return KEEPS.get(found.get("Status"))

    def close(self) -> None:
        """Release the connections; a later call opens new ones."""
        client, self._made = self._made, None
        if client is not None:
            client.close()

    def _forget(self) -> None:
        """Drop the client without closing it: after a fork its sockets are the parent's."""
        self._made = None
        self._lock = threading.Lock()

    def _client(self) -> S3Client:
        made = self._made
        if made is None:
            with self._lock:
                made = self._made = self._made or self._make()
        return made

    def _make(self) -> S3Client:
        return make_client(self._location, self._patience, 64 + self.concurrency, self._settings)

    def _ask(self, act: str, key: str, ask: Callable[[Wait], _T], size: int = 0) -> _T:
        """Repeat a request until an answer proves that it is from the store, or patience ends."""
        where = self._where(key)
        patience = self._patience if self._answered else self._patience.opening()
        attempts = Attempts(patience.allowing(size))
        writes = act in _WRITES
        made = Wait(act, where, patience, limit=TIMEOUT, writes=writes, size_bytes=size)
        with waiting(made) as wait:
            while True:
                try:
                    with hidden(self._secrets), translated(where, writes=writes), wait.attempt():
                        found = ask(wait)
                except StoreUnavailable as error:
                    attempts.failed(error)
                except ObjectNotFound:
                    self._answered = True
                    raise
                else:
                    self._answered = True
                    return found

    def _secrets(self) -> Secrets:
        """Return the secrets of the options, and the credentials that the SDK has found."""
        signer = getattr(self._made, "_request_signer", None)
        # Their attributes, since their properties may ask a server for newer ones.
        found = getattr(signer, "_credentials", None)
        return Secrets([self._settings.client, vars(found) if found is not None else {}])

    def _where(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def _object(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key), **self._always}

    def _put(
        self, key: str, buffers: Sequence[memoryview], condition: dict[str, Any], wait: Wait
    ) -> None:
        size = _size(buffers)
        checksum = 0
        for view in buffers:
            checksum = zlib.crc32(view, checksum)
        # As a header: over TLS the SDK would otherwise send it after the body, and for that split
        # the body into small pieces and copy it many times.
        header = base64.b64encode(checksum.to_bytes(4, "big")).decode()
        answer = self._client().put_object(
            **self._object(key),
            **self._settings.puts,
            **(self._settings.packs if key.startswith("packs/") else {}),
            **condition,
            **(_PAGE_TYPE if key.endswith(".html") else {}),
            Body=b"".join(buffers)
            if size <= _SMALL_BYTES
            else cast("IO[bytes]", SendBody(buffers, wait.moved)),
            ContentLength=size,
            ChecksumCRC32=header,
        )
        check_written(*_head(answer), header)

    def _listed(self, key: str) -> bool:
        """Return whether the store lists exactly this key; for use within `_ask`."""
        name = self._prefix + key
        page = self._list({"Prefix": name, "MaxKeys": 1})
        # The key would be the first one with this prefix.
        return any(entry["Key"] == name for entry in page.get("Contents", ()))

    def _page(self, query: dict[str, Any], left: int | None) -> ListObjectsV2OutputTypeDef:
        size = _PAGE if left is None else min(left, _PAGE)
        prefix = query["Prefix"][len(self._prefix) :]
        return self._ask("list", prefix, lambda _: self._list({**query, "MaxKeys": size}))

    def _list(self, query: dict[str, Any]) -> ListObjectsV2OutputTypeDef:
        asked = {"Bucket": self._bucket, **query}
        page = self._client().list_objects_v2(**asked, **self._always)
        check_page(page, asked)
        for keys in (
            [entry["Key"] for entry in page.get("Contents", ())],
            [folder["Prefix"] for folder in page.get("CommonPrefixes", ())],
        ):
            # Continuing after the last key would miss keys that an unsorted listing has later.
            if keys != sorted(keys):
                raise StoreUnsuitable(
                    "the store does not list its keys in order",
                    where=self._where(""),
                    hint="Use a general purpose bucket: directory buckets list in no order.",
                )
        return page

    def _entries(self, page: ListObjectsV2OutputTypeDef) -> Sequence[ObjectInfo]:
        cut = len(self._prefix)
        found = [
            ObjectInfo(
                entry["Key"][cut:],
                entry["Size"],
                entry["LastModified"].timestamp(),
                entry.get("StorageClass") in self.archives,
            )
            for entry in page.get("Contents", ())
            if len(entry["Key"]) > cut  # consoles make an empty object with the name of a folder
        ]
        found += [ObjectInfo(e["Prefix"][cut:], 0, 0.0) for e in page.get("CommonPrefixes", ())]
        return sorted(found, key=lambda info: info.key)

    def _next_page(self, page: ListObjectsV2OutputTypeDef, query: dict[str, Any]) -> str:
        token = page.get("NextContinuationToken")
        if not token or token == query.get("ContinuationToken"):
            raise StoreUnavailable("a listing that cannot be continued", where=self._where(""))
        return token


def _head(answer: Mapping[str, Any]) -> tuple[int, Mapping[str, str]]:
    """Return status and headers of an answer; the names of headers are in lower case."""
    metadata = answer["ResponseMetadata"]
    return metadata["HTTPStatusCode"], metadata["HTTPHeaders"]


def _size(buffers: Sequence[memoryview]) -> int:
    return sum(map(len, buffers))


def _forget_all() -> None:
    for backend in _open:
        backend._forget()


os.register_at_fork(after_in_child=_forget_all)
