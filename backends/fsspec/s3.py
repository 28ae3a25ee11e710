"""How s3fs is asked: its requests, with the proofs and the errors of `S3Backend`."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from botocore.exceptions import BotoCoreError, ClientError

from holdfast.backends.base import ObjectInfo
from holdfast.backends.errors import AccessDenied, ObjectNotFound, StorageError
from holdfast.backends.fsspec.dialect import BucketDialect, Call, Page, Query
from holdfast.backends.patience import Patience
from holdfast.backends.s3.errors import error_code, translated
from holdfast.backends.s3.proof import (
    NotProven,
    check_answered,
    check_deleted,
    check_found,
    check_page,
    check_raw,
)
from holdfast.backends.s3.settings import BUCKET_OWNER, KEEPS

# Larger bodies are refused by S3; smaller ones never leave as an upload of parts.
_ONE_PUT_BYTES = 5 * 2**30

_CHECKS = {
    "PutObject": check_answered,
    "GetObject": check_answered,
    "HeadObject": check_found,
    "DeleteObject": check_deleted,
}


class S3Dialect(BucketDialect):
    """s3fs."""

    def __init__(self) -> None:
        super().__init__("s3fs", "")

    def options(self, given: Mapping[str, Any], patience: Patience) -> dict[str, Any]:
        """Add our patience and the expected owner; the backend itself repeats requests."""
        usual = {
            "connect_timeout": patience.connect_s,
            "read_timeout": patience.try_s,
            "retries": {"mode": "standard", "total_max_attempts": 1},
        }
        extra = dict(given.get("s3_additional_kwargs") or {})
        if owner := os.environ.get(BUCKET_OWNER):
            extra["ExpectedBucketOwner"] = owner
        return {
            **given,
            "config_kwargs": usual | dict(given.get("config_kwargs") or {}),
            "s3_additional_kwargs": extra,
            "use_listings_cache": False,
        }

    def prepare(self, call: Call) -> None:
        """Check raw answers before they are parsed, and leave repeats to the backend."""
        call.fs.retries = 1
        call("connect").meta.events.register("before-parse.s3", _before_parse)

    def query(self, fs: Any) -> str:
        """Return the server and region that options name, as `S3Backend.url` does."""
        client = fs.client_kwargs
        named = {
            "endpoint_url": fs.endpoint_url or client.get("endpoint_url"),
            "region": client.get("region_name") or fs.config_kwargs.get("region_name"),
        }
        found = urlencode({k: v for k, v in named.items() if v is not None}, safe=":/")
        return f"?{found}" if found else ""

    def put_options(self, data: bytes) -> dict[str, Any]:
        """Have one PUT for each object, with its checksum in a header.

        Over TLS the SDK would otherwise send the checksum after a body whose length is not
        announced; radosgw refuses that.
        """
        checksum = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        return {"chunksize": _ONE_PUT_BYTES, "ChecksumCRC32": checksum}

    def says_exists(self, error: Exception) -> bool:
        """Return whether the condition failed; other details differ between servers."""
        cause = error.__cause__
        return isinstance(cause, ClientError) and error_code(cause) == "PreconditionFailed"

    def read_all(self, call: Call, path: str) -> bytes:
        """Read an object by one request; with more than one s3fs reads it in parts."""
        found: bytes = call("cat_file", path, max_concurrency=1)
        return found

    def stat(self, call: Call, path: str) -> ObjectInfo:
        """Return size and time; a listing of exactly that key confirms an absence."""
        bucket, key, _ = call.fs.split_path(path)
        try:
            found = call("call_s3", "head_object", Bucket=bucket, Key=key)
        except FileNotFoundError as error:
            # The answer to HEAD has no body, so it does not prove who answered.
            page = self.page(call, Query(bucket, key, "", delimiter=False, size=1))
            if any(info.key == key for info in page.objects):
                raise NotProven("HTTP 404 for what the store lists") from error
            raise ObjectNotFound("no such object", where=path) from error
        return ObjectInfo(path, found["ContentLength"], found["LastModified"].timestamp())

    def page(self, call: Call, query: Query) -> Page:
        """Return a page of a listing that S3 begins where it is wanted."""
        asked: dict[str, Any] = {"Bucket": query.bucket, "Prefix": query.prefix}
        if query.start_after:
            asked["StartAfter"] = query.start_after
        if query.delimiter:
            asked["Delimiter"] = "/"
        if query.token is not None:
            asked["ContinuationToken"] = query.token
        page = call("call_s3", "list_objects_v2", **asked, MaxKeys=query.size)
        check_page(page, asked)
        return Page(
            [
                ObjectInfo(entry["Key"], entry["Size"], entry["LastModified"].timestamp())
                for entry in page.get("Contents", ())
            ],
            [folder["Prefix"] for folder in page.get("CommonPrefixes", ())],
            page.get("NextContinuationToken", "") if page["IsTruncated"] else None,
        )

    def keeps_versions(self, call: Call, bucket: str) -> bool | None:
        """Return whether the bucket keeps versions."""
        found = call("call_s3", "get_bucket_versioning", Bucket=bucket)
        return KEEPS.get(found.get("Status"))

    @contextmanager
    def translated(self, where: str, *, writes: bool = False) -> Iterator[None]:
        """Turn errors into ours by the error of the SDK that s3fs replaced."""
        with translated(where, writes=writes):
            try:
                yield
            except StorageError:
                raise
            except OSError as error:
                if isinstance(error.__cause__, (ClientError, BotoCoreError)):
                    raise error.__cause__ from None
                if isinstance(error, FileNotFoundError):
                    raise ObjectNotFound("no such object", where=where) from error
                if isinstance(error, PermissionError):
                    raise AccessDenied("access is denied", where=where, found=error) from error
                raise


def _before_parse(operation_model: Any, response_dict: dict[str, Any], **_: object) -> None:
    operation, status = operation_model.name, response_dict["status_code"]
    headers = response_dict["headers"]
    check_raw(operation, status, headers, response_dict["body"])
    if status < 300 and operation in _CHECKS:
        _CHECKS[operation](status, headers)
