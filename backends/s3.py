"""The store in an S3 bucket, over the core of boto3 (why: `docs/design/s3-transport.md`).

`put_if_absent` is a PUT with `If-None-Match: *`. The SDK repeats a PUT whose answer was lost, and
the repeat of a PUT that did create the object is refused: a False may thus speak of the caller's
own bytes. Whoever must know who created an object reads it back.

Credentials, profile, region and endpoint come from the usual AWS environment, the last two also
from the URL. `HOLDFAST_S3_BUCKET_OWNER` (an account id) makes every request fail on a bucket of
anybody else. The role needs ListBucket besides GetObject: without it S3 answers 403 for what is
absent, and absence is never guessed.
"""

from __future__ import annotations

import base64
import os
import random
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from typing import IO, TYPE_CHECKING, Any, cast
from weakref import WeakSet

import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.loaders import Loader, create_loader

from backends.base import Backend, Body, ByteRange, ObjectInfo, as_buffers, check_into, check_key
from backends.errors import (
    AccessDenied,
    InvalidLocation,
    ObjectNotFound,
    ObjectTruncated,
    StoreUnavailable,
    StoreUnsuitable,
)
from backends.limits import check_whole
from backends.location import Location
from backends.s3_body import SendBody, fill
from backends.s3_errors import error_code, no_such_bucket, translated

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, ListObjectsV2OutputTypeDef

BUCKET_OWNER = "HOLDFAST_S3_BUCKET_OWNER"

_ATTEMPTS = 5
_CONFLICTS = 8
_PAGE = 1000
# Below this a body is joined and leaves in one segment with its headers; above, the SDK asks first
# whether it may send it (Expect: 100-continue), which spares a refused conditional put the upload.
_SMALL_BYTES = 64 * 1024
# What a bucket's versioning means for what is deleted; one that never had any has no status.
_KEEPS: dict[str | None, bool] = {"Enabled": True, None: False}

_open: WeakSet[S3Backend] = WeakSet()


class S3Backend(Backend):
    """Objects of a bucket under a prefix.

    Nothing stays unfinished here: each object is one PUT, never an upload of parts.

    Args:
        location: The bucket, and options for the client.
    """

    concurrency = 16

    def __init__(self, location: Location) -> None:
        self._location = location
        self._bucket = location.name
        self._base = f"{location.path}/" if location.path else ""
        owner = os.environ.get(BUCKET_OWNER)
        self._owner: dict[str, Any] = {"ExpectedBucketOwner": owner} if owner else {}
        self._bucket_seen = False
        self._made: S3Client | None = None
        self._lock = threading.Lock()
        _open.add(self)

    @property
    def url(self) -> str:
        """`s3://BUCKET/PREFIX`, with the endpoint where the URL named one."""
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
        options: dict[str, Any] = {}
        if byte_range is not None:
            options["Range"] = f"bytes={byte_range.start}-{byte_range.stop - 1}"
        where = self._where(key)
        with translated(where):
            answer = self._client().get_object(**self._object(key), **options)
            with closing(answer["Body"]) as stream:
                _check_length(answer, byte_range, where)
                if into is None:
                    # The SDK's stream checks that as many bytes come as were announced.
                    return stream.read()
                fill(stream, views)
        return b""

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object, atomically and durably."""
        with translated(self._where(key)):
            self._put(key, as_buffers(body), {})

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; False may mean one's own lost answer (see above)."""
        buffers = as_buffers(body)
        with translated(self._where(key)):
            for attempt in range(_CONFLICTS):
                try:
                    self._put(key, buffers, {"IfNoneMatch": "*"})
                except ClientError as error:
                    if error_code(error) in ("PreconditionFailed", "412"):
                        return False
                    if error_code(error) not in ("ConditionalRequestConflict", "409"):
                        raise
                    time.sleep(random.uniform(0, 0.05 * 2**attempt))
                else:
                    return True
        raise StoreUnavailable(
            f"another write of this key was under way at each of {_CONFLICTS} attempts",
            where=self._where(key),
            hint="Try again.",
        )

    def stat(self, key: str) -> ObjectInfo:
        """Tell size and time of an object."""
        where = self._where(key)
        with translated(where):
            try:
                found = self._client().head_object(**self._object(key))
            except ClientError as error:
                if error_code(error) != "404":
                    raise
                # The answer to HEAD has no body, so it does not say what is absent.
                self._check_bucket()
                raise ObjectNotFound("no such object", where=where) from error
        return ObjectInfo(key, found["ContentLength"], found["LastModified"].timestamp())

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects in order."""
        query: dict[str, Any] = {"Prefix": self._base + prefix}
        if start_after:
            query["StartAfter"] = self._base + start_after
        if delimiter:
            query["Delimiter"] = "/"
        last = start_after
        left = limit
        while left is None or left > 0:
            page = self._page(query, left)
            for info in self._entries(page):
                # S3 counts a folder as after a key within it; and a page may come twice.
                if info.key > last and (left is None or left > 0):
                    last = info.key
                    left = None if left is None else left - 1
                    yield info
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = self._next_page(page, query)

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""
        with translated(self._where(key)):
            try:
                self._client().delete_object(**self._object(key))
            except ClientError as error:
                if error_code(error) not in ("NoSuchKey", "404"):
                    raise

    def keeps_versions(self) -> bool | None:
        """Tell whether the bucket keeps versions; None where it does not tell this role.

        None also where versioning is suspended: an object put before that stays as a version when
        it is deleted, one put since does not.
        """
        try:
            with translated(self._where("")):
                found = self._client().get_bucket_versioning(Bucket=self._bucket, **self._owner)
        except (AccessDenied, StoreUnsuitable):
            return None
        return _KEEPS.get(found.get("Status"))

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
                made = self._made = self._made or _make_client(self._location)
        return made

    def _where(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._base}{key}"

    def _object(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._base + check_key(key), **self._owner}

    def _put(self, key: str, buffers: Sequence[memoryview], condition: dict[str, Any]) -> None:
        size = sum(map(len, buffers))
        checksum = 0
        for view in buffers:
            checksum = zlib.crc32(view, checksum)
        self._client().put_object(
            **self._object(key),
            **condition,
            Body=b"".join(buffers)
            if size <= _SMALL_BYTES
            else cast("IO[bytes]", SendBody(buffers)),
            ContentLength=size,
            # Given as a header because over TLS the SDK would send it behind a body that it cuts
            # into pieces of its own, copying each many times.
            ChecksumCRC32=base64.b64encode(checksum.to_bytes(4, "big")).decode(),
        )
        self._bucket_seen = True

    def _check_bucket(self) -> None:
        if self._bucket_seen:
            return
        try:
            # Not HeadBucket: a role may list under the prefix alone.
            self._client().list_objects_v2(
                Bucket=self._bucket, Prefix=self._base, MaxKeys=1, **self._owner
            )
        except ClientError as error:
            if error_code(error) in ("NoSuchBucket", "404"):
                raise no_such_bucket(f"s3://{self._bucket}") from error
            raise
        self._bucket_seen = True

    def _page(self, query: dict[str, Any], left: int | None) -> ListObjectsV2OutputTypeDef:
        size = _PAGE if left is None else min(left, _PAGE)
        with translated(self._where("")):
            return self._client().list_objects_v2(
                Bucket=self._bucket, MaxKeys=size, **self._owner, **query
            )

    def _entries(self, page: ListObjectsV2OutputTypeDef) -> Sequence[ObjectInfo]:
        cut = len(self._base)
        found = [
            ObjectInfo(entry["Key"][cut:], entry["Size"], entry["LastModified"].timestamp())
            for entry in page.get("Contents", ())
            if len(entry["Key"]) > cut  # consoles mark a folder by an empty object of its name
        ]
        found += [ObjectInfo(e["Prefix"][cut:], 0, 0.0) for e in page.get("CommonPrefixes", ())]
        return sorted(found, key=lambda info: info.key)

    def _next_page(self, page: ListObjectsV2OutputTypeDef, query: dict[str, Any]) -> str:
        token = page.get("NextContinuationToken")
        if not token or token == query.get("ContinuationToken"):
            raise StoreUnavailable("a listing that does not go on", where=self._where(""))
        return token


def _make_client(location: Location) -> S3Client:
    endpoint = location.endpoint_url or _endpoint_of_environment()
    with translated(location.url):
        try:
            session = botocore.session.get_session()
            models = _models(session.get_config_variable("data_path"))
            session.register_component("data_loader", models)
            client = session.create_client(
                "s3",
                endpoint_url=location.endpoint_url,
                region_name=location.region,
                config=_config(endpoint),
            )
            return cast("S3Client", client)
        except ValueError as error:
            raise InvalidLocation(str(error), where=location.url) from error


@cache
def _models(search_path: str | None) -> Loader:
    """Return the descriptions of AWS's services; to parse them is most of what a client takes."""
    return create_loader(search_path)


def _endpoint_of_environment() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _config(endpoint: str | None) -> Config:
    # Our checksum goes with each body, and TLS protects it; without TLS its SHA-256 is signed.
    signed = endpoint is not None and endpoint.startswith("http://")
    return Config(
        # One for every thread that a registry may ask with, or urllib3 warns and reconnects.
        max_pool_connections=64 + S3Backend.concurrency,
        connect_timeout=10,
        read_timeout=60,
        tcp_keepalive=True,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        s3={
            "addressing_style": "path" if endpoint else "auto",
            "payload_signing_enabled": signed,
        },
        # Whatever is read is checked against a SHA-256 by those who asked for it.
        response_checksum_validation="when_required",
        user_agent_extra="holdfast",
    )


def _check_length(answer: GetObjectOutputTypeDef, byte_range: ByteRange | None, where: str) -> None:
    found = answer["ContentLength"]
    if byte_range is None:
        check_whole(found, where)
        return
    if found == len(byte_range):
        return
    if found < len(byte_range):
        raise ObjectTruncated(
            "the object ends before the range does",
            where=where,
            expected=f"at least {byte_range.stop} bytes",
            found=f"{byte_range.start + found} bytes",
        )
    raise StoreUnavailable(
        "the store sent more than the range asked for",
        where=where,
        expected=f"{len(byte_range)} bytes",
        found=f"{found} bytes",
    )


def _forget_all() -> None:
    for backend in _open:
        backend._forget()


os.register_at_fork(after_in_child=_forget_all)
