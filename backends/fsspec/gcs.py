"""How gcsfs is asked: Google's own listings and reads, and what its errors mean.

| said | error |
|---|---|
| an object that a listing does not show | ObjectNotFound |
| 404 for a bucket | InvalidLocation |
| 416, and a listing that agrees | ObjectTruncated |
| 401, 403, no usable credentials | AccessDenied |
| 429, 5xx, timeouts, broken connections, an answer without proof | StoreUnavailable |
| anything else | StorageError |

The instances are of gcsfs's plain class. Its other class, which is the usual one, writes to zonal
buckets by a protocol in which a create is no condition. An object goes in one request: the
condition of the create is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import MethodType
from typing import Any

from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError
from google.auth.exceptions import GoogleAuthError

from holdfast.backends.base import ObjectInfo
from holdfast.backends.errors import (
    AccessDenied,
    InvalidLocation,
    ObjectNotFound,
    ObjectTruncated,
    StorageError,
)
from holdfast.backends.fsspec.dialect import BucketDialect, Call, Page, Query, said
from holdfast.backends.patience import Patience, not_proven, unanswered

# Larger than every object: gcsfs sends larger ones in parts.
_ONE_PUT_BYTES = 5 * 2**40
_RANGE = re.compile(r"bytes (\d+)-(\d+)/\d+")
_HOW_TO_LOG_IN = (
    "Give the option token, or set GOOGLE_APPLICATION_CREDENTIALS, or run "
    "`gcloud auth application-default login`."
)


class GcsDialect(BucketDialect):
    """gcsfs."""

    log_in = _HOW_TO_LOG_IN

    def __init__(self) -> None:
        super().__init__("gcsfs", "")

    def class_of(self, fs: Any) -> type:  # noqa: ARG002
        """Return the plain class of gcsfs."""
        plain: type = GCSFileSystem
        return plain

    def options(self, given: Mapping[str, Any], patience: Patience) -> dict[str, Any]:  # noqa: ARG002
        """Turn the cache of listings off."""
        return {**given, "use_listings_cache": False}

    def prepare(self, call: Call) -> None:
        """Leave repeats to the backend."""
        once = getattr(type(call.fs)._request, "__wrapped__", None)
        if once is not None:
            call.fs._request = MethodType(once, call.fs)

    def server(self, fs: Any) -> str:
        """Return the endpoint, if it is another one than Google's."""
        return str(fs._location).removeprefix("https://storage.googleapis.com")

    def put_options(self, data: bytes) -> dict[str, Any]:  # noqa: ARG002
        """Have one request for each object."""
        return {"chunksize": _ONE_PUT_BYTES}

    def read(self, call: Call, path: str, start: int, end: int) -> bytes:
        """Read a range; a listing confirms that an object is absent."""
        try:
            found: bytes = call.run(_range, call.fs, path, start, end)
        except FileNotFoundError:
            # An answer without proof: somebody else may have given it.
            self.stat(call, path)
            raise unanswered("HTTP 404 for what the store lists", f"gs://{path}") from None
        except HttpError as error:
            if str(error.code) != "416":
                raise
            if self.stat(call, path).size_bytes > start:
                raise unanswered(
                    "HTTP 416 for a range within the object", f"gs://{path}"
                ) from error
            raise ObjectTruncated("the object ends before the range begins", where=path) from error
        return found

    def read_all(self, call: Call, path: str) -> bytes:
        """Read an object by one request, so that all bytes are of one version of it."""
        return self.read(call, path, 0, self.stat(call, path).size_bytes)

    def remove(self, call: Call, path: str) -> None:
        """Remove an object; a listing confirms that it is absent now."""
        try:
            call("rm_file", path)
        except FileNotFoundError:
            self.stat(call, path)
            raise unanswered(
                "HTTP 404 for what the store lists", f"gs://{path}", writes=True
            ) from None
        try:
            self.stat(call, path)
        except ObjectNotFound:
            return
        raise unanswered("a deletion was acknowledged, and not done", path, writes=True)

    def stat(self, call: Call, path: str) -> ObjectInfo:
        """Return size and time, as a listing of exactly that name tells them."""
        bucket, name, _ = call.fs.split_path(path)
        page = self.page(call, Query(bucket, name, "", delimiter=False, size=1))
        for info in page.objects:
            if info.key == name:
                return ObjectInfo(path, info.size_bytes, info.modified_s)
        raise ObjectNotFound("no such object", where=path)

    def page(self, call: Call, query: Query) -> Page:
        """Return a page of a listing that Google begins where it is wanted."""
        asked: dict[str, Any] = {"prefix": query.prefix, "maxResults": query.size}
        if query.start_after:
            # The first name is included, so it may be that one.
            asked |= {"startOffset": query.start_after, "maxResults": query.size + 1}
        if query.delimiter:
            asked["delimiter"] = "/"
        if query.token is not None:
            asked["pageToken"] = query.token
        page = call("call", "GET", "b/{}/o", query.bucket, json_out=True, **asked)
        if not isinstance(page, dict) or page.get("kind") != "storage#objects":
            raise unanswered("a listing that is not one of Google's", query.bucket)
        objects, folders = page.get("items", ()), page.get("prefixes", ())
        names = [*(entry["name"] for entry in objects), *folders]
        if any(not name.startswith(query.prefix) for name in names):
            raise unanswered("a listing with names that were not asked for", f"gs://{query.bucket}")
        return Page(
            [_described(entry) for entry in objects], folders, page.get("nextPageToken") or None
        )

    def keeps_versions(self, call: Call, bucket: str) -> bool | None:
        """Return whether the bucket keeps versions."""
        found = call("call", "GET", "b/{}", bucket, json_out=True)
        return bool(found.get("versioning", {}).get("enabled"))

    @contextmanager
    def translated(self, where: str, *, writes: bool = False) -> Iterator[None]:
        """Turn errors of gcsfs into ours."""
        try:
            yield
        except StorageError:
            raise
        except HttpError as error:
            raise _of_google(error, where, writes) from error
        except GoogleAuthError as error:
            raise _denied(error, where) from error
        except FileNotFoundError as error:
            raise InvalidLocation(
                "no such bucket", where=where, hint="Create it first, or check the spelling."
            ) from error
        except OSError as error:
            if str(error).startswith("Forbidden") and "<" not in str(error):
                raise _denied(error, where) from error
            raise unanswered(said(error), where, writes=writes) from error
        except ValueError as error:
            if str(error).startswith("Bad Request"):
                raise StorageError(
                    "the store refused the request", where=where, found=said(error)
                ) from error
            # An answer that is not JSON does not come from Google.
            raise unanswered(said(error), where, writes=writes) from error
        except Exception as error:
            # aiohttp's errors, and gcsfs's errors for answers that it does not understand.
            raise unanswered(said(error), where, writes=writes) from error


async def _range(fs: Any, path: str, start: int, end: int) -> bytes:
    if start == end:
        return b""
    status, headers, _, data = await fs._request(
        "GET", fs.url(path), headers={"Range": f"bytes={start}-{end - 1}"}
    )
    # A page in the place of an object has no generation.
    if not headers.get("x-goog-generation"):
        raise not_proven(f"HTTP {status} without the generation of an object", f"gs://{path}")
    told = _RANGE.fullmatch(headers.get("Content-Range", ""))
    if status != 206 or told is None:
        raise unanswered(f"HTTP {status} for a range", f"gs://{path}")
    if (int(told[1]), int(told[2]) + 1) != (start, start + len(data)):
        raise unanswered(f"another range: {told[0]}", f"gs://{path}")
    found: bytes = data
    return found


def _of_google(error: HttpError, where: str, writes: bool) -> StorageError:
    code = int(error.code) if str(error.code).isdigit() else 0
    # Errors of Google are JSON; of others gcsfs repeats the whole text.
    if code in (408, 416, 429) or code >= 500 or "<" in str(error):
        return unanswered(said(error), where, writes=writes)
    if code in (401, 403):
        return _denied(error, where)
    return StorageError("the store refused the request", where=where, found=said(error))


def _denied(error: Exception, where: str) -> AccessDenied:
    return AccessDenied("access is denied", where=where, found=said(error), hint=_HOW_TO_LOG_IN)


def _described(entry: Mapping[str, Any]) -> ObjectInfo:
    time = datetime.fromisoformat(entry["updated"])
    return ObjectInfo(entry["name"], int(entry["size"]), time.timestamp())
