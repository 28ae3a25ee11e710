"""Check that an answer came from the store, and not from something in between.

Proxies, login pages, load balancers and caches answer in place of the store, most often with 200 or
404 and a page. Such an answer could acknowledge a write that did not happen, or make an object look
absent. So each answer must contain something that only the store can know; `docs/spec.md`,
section 1, has the table.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_plus

from holdfast.backends.base import ByteRange

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import (
        CopyObjectOutputTypeDef,
        DeleteObjectsOutputTypeDef,
        ListObjectsV2OutputTypeDef,
    )

Headers = Mapping[str, str]

_XML_HEAD = rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]{0,200}\?>)?\s*"
_ERROR = re.compile(_XML_HEAD + rb"<Error[\s>]")
_ROOTS = {
    "CopyObject": re.compile(_XML_HEAD + rb"<(?:\w+:)?CopyObjectResult[\s/>]"),
    "DeleteObjects": re.compile(_XML_HEAD + rb"<(?:\w+:)?DeleteResult[\s/>]"),
    "ListObjectsV2": re.compile(_XML_HEAD + rb"<(?:\w+:)?ListBucketResult[\s/>]"),
    # Emulators use the long name.
    "GetBucketVersioning": re.compile(
        _XML_HEAD + rb"<(?:\w+:)?(?:GetBucketVersioningResponse|VersioningConfiguration)[\s/>]"
    ),
}
_SILENT = ("PutObject", "DeleteObject", "RestoreObject")
# Every S3 server sends an ETag with the form of an MD5; ETags of web servers have other forms. A
# proxy may have marked the ETag as weak.
_ETAG = re.compile(r'(?:W/)?"?[0-9A-Fa-f]{32}(?:-[0-9]+)?"?')
# With an ETag of another form (directory buckets, encryption) the store sends one of these headers.
_NAMES = ("x-amz-request-id", "x-amz-id-2", "x-amz-version-id", "x-goog-hash")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_LENGTH = re.compile(r"[0-9]{1,19}")
_TITLE = re.compile(r"<title[^>]{0,200}>([^<]{1,200})", re.IGNORECASE)
# Listings through an access point have the name of the bucket behind it.
_ALIASES = ("-s3alias", "--ol-s3")


class NotProven(Exception):
    """A proxy could have given this answer too; the message describes it."""


class Redirected(NotProven):
    """A redirect that does not name the region."""


def check_raw(operation: str, status: int, headers: Headers, body: object) -> None:
    """Check an answer before the SDK parses it; an object's body is a stream, others are bytes.

    Raises:
        NotProven: The store would not give such an answer.
    """
    text = body if isinstance(body, bytes) else b""
    is_error = bool(_ERROR.match(text))
    if status in (301, 302, 303, 307, 308):
        _check_redirect(status, headers, text)
    elif status >= 500 or status == 429:
        # A server error proves nothing. The SDK makes a 500 of a 200 that it cannot parse.
        if text.strip() and not is_error:
            raise NotProven(f"no answer of S3, or one cut off: {_page(headers, text)}")
    elif status >= 300:
        # The answer to HEAD has no body.
        if not (is_error or operation.startswith("Head")):
            raise NotProven(_described(status, headers, text))
    elif (operation in _SILENT and text.strip()) or (
        operation in _ROOTS and not _ROOTS[operation].match(text)
    ):
        raise NotProven(_described(status, headers, text))


def check_written(status: int, headers: Headers, checksum: str) -> None:
    """Check that the store acknowledged a put.

    Raises:
        NotProven: It did not.
    """
    echoed = headers.get("x-amz-checksum-crc32")
    if echoed is not None and echoed != checksum:
        raise NotProven(f"HTTP {status} with the checksum of other bytes")
    if echoed is None and not _is_of_store(headers):
        raise NotProven(_described(status, headers))


def check_copied(answer: CopyObjectOutputTypeDef) -> None:
    """Check that the store acknowledged a copy.

    Raises:
        NotProven: It did not.
    """
    if not answer.get("CopyObjectResult", {}).get("ETag"):
        raise NotProven("an answer to a copy without the ETag of the new object")


def check_answered(status: int, headers: Headers) -> None:
    """Check that an answer names an object of the store; says nothing of its bytes.

    Raises:
        NotProven: It does not.
    """
    if not _is_of_store(headers):
        raise NotProven(_described(status, headers))


def check_found(status: int, headers: Headers) -> None:
    """Check that the store described an object.

    Raises:
        NotProven: It did not.
    """
    if not (
        status == 200
        and _is_of_store(headers)
        and _LENGTH.fullmatch(headers.get("content-length", ""))
        and headers.get("last-modified")
    ):
        raise NotProven(_described(status, headers))


def check_deleted(status: int, headers: Headers) -> None:
    """Check that the store acknowledged a deletion.

    Raises:
        NotProven: It did not.
    """
    if status != 204:
        raise NotProven(_described(status, headers))


def check_all_deleted(
    answer: DeleteObjectsOutputTypeDef, names: Collection[str]
) -> dict[str, tuple[str, str]]:
    """Check that the store answered for each object of a request for many deletions.

    Returns:
        The code and the message of the error of each object that is still there.

    Raises:
        NotProven: It did not, or it named other objects.
    """
    deleted = [entry.get("Key", "") for entry in answer.get("Deleted", ())]
    failed = {
        error.get("Key", ""): (error.get("Code", ""), error.get("Message", ""))
        for error in answer.get("Errors", ())
    }
    told = sorted([*deleted, *failed])
    if told != sorted(names) or not all(code for code, _ in failed.values()):
        raise NotProven(f"{len(told)} results, or other ones, for {len(names)} deletions")
    return {name: said for name, said in failed.items() if said[0] != "NoSuchKey"}


def check_got(status: int, headers: Headers, byte_range: ByteRange | None) -> int:
    """Check that the store sent an object or the requested range.

    Returns:
        The length of the body: shorter than the range if the object ends within it.

    Raises:
        NotProven: It did not.
    """
    length = headers.get("content-length", "")
    encoding = headers.get("content-encoding", "").lower()
    # Some servers keep `aws-chunked` from an upload in pieces, but the body is plain nevertheless.
    plain = all(word.strip() in ("", "identity", "aws-chunked") for word in encoding.split(","))
    if not (plain and _is_of_store(headers) and _LENGTH.fullmatch(length)):
        raise NotProven(_described(status, headers))
    if byte_range is None:
        if status != 200:
            raise NotProven(_described(status, headers))
        return int(length)
    found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    if status != 206 or found is None:
        raise NotProven(f"{_described(status, headers)} to a request for a range")
    first, last, total = map(int, found.groups())
    stop = min(byte_range.stop, total)
    if (first, last + 1, int(length)) != (byte_range.start, stop, stop - byte_range.start):
        raise NotProven(f"not the requested range: {found[0]}, of {int(length)} bytes")
    return int(length)


def check_page(page: ListObjectsV2OutputTypeDef, query: Mapping[str, object]) -> None:
    """Check that a page of a listing answers the query.

    Args:
        page: The page.
        query: The query.

    Raises:
        NotProven: It is for another bucket or prefix, or incomplete.
    """
    bucket, prefix = str(query["Bucket"]), str(query["Prefix"])
    name, echoed = page.get("Name"), page.get("Prefix")
    if not name and echoed is None:
        raise NotProven("a listing that names no bucket and no prefix")
    if name and name != bucket and not bucket.endswith(_ALIASES):
        raise NotProven(f"a listing of another bucket, {_shown(name)}")
    if echoed is not None and not _same(echoed, prefix):
        raise NotProven(f"a listing of another prefix, {_shown(echoed) or 'none'}")
    delimiter, start = page.get("Delimiter"), page.get("StartAfter")
    if delimiter and not _same(delimiter, str(query.get("Delimiter", ""))):
        raise NotProven(f"a listing with the delimiter {_shown(delimiter)}")
    # A later page may have its own start.
    first = "ContinuationToken" not in query
    if start and first and not _same(start, str(query.get("StartAfter", ""))):
        raise NotProven(f"a listing that starts after {_shown(start)}")
    if "IsTruncated" not in page:
        raise NotProven("a listing that does not tell whether it is complete")
    entries, folders = page.get("Contents", ()), page.get("CommonPrefixes", ())
    if not all(e.get("Key") and "Size" in e and "LastModified" in e for e in entries):
        raise NotProven("a listing with entries that lack key, size or time")
    if not all(f.get("Prefix") for f in folders):
        raise NotProven("a listing with folders that lack a name")
    keys = [e["Key"] for e in entries] + [f["Prefix"] for f in folders]
    strange = next((key for key in keys if not key.startswith(prefix)), None)
    if strange is not None:
        raise NotProven(f"a listing with a key of another prefix, {_shown(strange)}")


def _check_redirect(status: int, headers: Headers, text: bytes) -> None:
    if headers.get("x-amz-bucket-region") or (_ERROR.match(text) and b"<Region>" in text):
        return  # the SDK repeats the request with that region, and with the same endpoint if given
    described = _described(status, headers, text)
    if location := headers.get("location"):
        described += f", to {_shown(location.partition('?')[0])}"
    if status in (301, 308) or _ERROR.match(text):
        raise Redirected(described)
    raise NotProven(described)


def _is_of_store(headers: Headers) -> bool:
    etag = headers.get("etag", "")
    return bool(_ETAG.fullmatch(etag) or (etag and any(headers.get(name) for name in _NAMES)))


def _same(echoed: str, asked: str) -> bool:
    # Servers encode names in different ways; the SDK has decoded them once.
    return echoed in (asked, unquote_plus(asked), quote(asked), quote(asked, safe=""))


def _described(status: int, headers: Headers, text: bytes = b"") -> str:
    return f"HTTP {status} {_page(headers, text)}"


def _page(headers: Headers, text: bytes) -> str:
    kind = headers.get("content-type", "").partition(";")[0].strip() or "of no type"
    encoding = headers.get("content-encoding", "")
    page = text[:4000].decode("utf-8", "replace")
    title = _TITLE.search(page)
    said = _shown(title[1] if title else page)
    return " ".join(filter(None, [_shown(kind), _shown(encoding)])) + (f": {said}" if said else "")


def _shown(text: str) -> str:
    """Return the beginning of a foreign text on one line, without control characters."""
    printable = "".join(c if c.isprintable() else " " for c in text[:400])
    return " ".join(printable.split())[:80]
