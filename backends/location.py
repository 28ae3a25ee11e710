"""The location of a registry: parse its URL, and hide the secrets in it.

| URL | store |
|---|---|
| `PATH`, `file:///PATH` | a folder of this machine (`~` is expanded in the first form) |
| `memory://NAME` | a named store in the memory of this process |
| `s3://BUCKET/PREFIX`, `s3a://...` | a bucket; options `?endpoint_url=URL` and `&region=NAME` |
| any other, such as `az://CONTAINER/PREFIX` | what fsspec finds under that scheme |

This module contacts no store, and none of its messages repeats a password. Credentials belong in
the environment, since URLs are seen in logs, histories and process lists.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from holdfast.backends.base import check_key
from holdfast.backends.errors import InvalidLocation
from holdfast.backends.escape import quoted

SCHEMES = ("file", "memory", "s3")
# In the URLs of Azure a container may stand before an `@`.
_CONTAINER_FIRST = ("abfs", "abfss", "az")
_WITHOUT_QUERY = (*_CONTAINER_FIRST, "gs", "gcs")
# Schemes that make a path a mistyped URL, if one slash follows them or none.
_MISTYPED = (*SCHEMES, "s3a", *_WITHOUT_QUERY, "http", "https")
# Where the credentials of a scheme belong.
_INSTEAD = {
    "s3": "set them in the environment (AWS_PROFILE, AWS_ACCESS_KEY_ID)",
    **dict.fromkeys(_CONTAINER_FIRST, "set AZURE_STORAGE_CONNECTION_STRING"),
    **dict.fromkeys(("gs", "gcs"), "set GOOGLE_APPLICATION_CREDENTIALS"),
}
_INSTEAD_OF_OTHERS = "give them as storage options, for example in HOLDFAST_STORAGE_OPTIONS"
S3_OPTIONS = ("endpoint_url", "region")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# `s3:/bucket`, `s3:bucket` and ` s3://bucket` are mistyped URLs rather than folders of those names.
_NEARLY_URL = re.compile(r"[^A-Za-z0-9./~]*([A-Za-z][A-Za-z0-9+.-]+):(//)?")
_BUCKET = r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]"
_CREDENTIALS = r"([A-Za-z][A-Za-z0-9+.-]*)(:/*)([^\s]*)@"
_CONTAINER = r"[a-z0-9$-]{3,63}"
_OPTION = r"([?&])([^=&\s]*)=([^&\s]*)"


class Location(NamedTuple):
    """The location of a registry.

    Attributes:
        scheme: The kind of store: one of `SCHEMES`, or a scheme that fsspec may know.
        name: The bucket, or the name of a memory store; empty for a folder.
        path: Absolute path of a folder, or prefix within a bucket without slashes at its ends; all
            that follows a scheme of fsspec.
        endpoint_url: The S3 server, if the URL names one.
        region: The S3 region, if the URL names one.
        server: The server or account of a store behind fsspec, which its URL does not name.
    """

    scheme: str
    name: str = ""
    path: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    server: str = ""

    @property
    def url(self) -> str:
        """The location as a URL, which `parse` can read."""
        if self.scheme == "file":
            return "file://" + quote(os.fsencode(self.path))
        if self.scheme not in SCHEMES:
            return redact(f"{self.scheme}://{self.path}")
        base = f"{self.scheme}://{self.name}" + (f"/{self.path}" if self.path else "")
        options = {"endpoint_url": self.endpoint_url, "region": self.region}
        query = urlencode({k: v for k, v in options.items() if v is not None}, safe=":/")
        return f"{base}?{query}" if query else base


def parse(url: str | os.PathLike[str]) -> Location:
    """Parse a URL or a path.

    Raises:
        InvalidLocation: It cannot be the location of a registry; the message repeats no secret.
    """
    try:
        text = os.fsdecode(url)
    except TypeError as error:
        raise InvalidLocation(
            "not a URL or a path", found=quoted(url), expected=_forms()
        ) from error
    if not text or any(ord(character) < 32 for character in text):
        raise InvalidLocation(
            "empty, or holds control characters", where=quoted(redact(text)), expected=_forms()
        )
    match = _URL.match(text)
    if match is None:
        return _parse_path(text)
    scheme = match[1].lower()
    if scheme == "s3a":
        scheme, text = "s3", f"s3{text[3:]}"
    if scheme not in SCHEMES:
        return _parse_foreign(text, scheme, match[2])
    _refuse_credentials(text, scheme, match[2])
    if scheme == "file":
        return _parse_file(text)
    return _parse_memory(text) if scheme == "memory" else _parse_s3(text)


def redact(text: str) -> str:
    """Return `text` with possible secrets in its URLs replaced by `***`.

    This replaces everything between `://` (or `:/`, or `:`) and the last `@`, since secret keys may
    hold slashes, and the value of every option that is not known to be harmless. A container of
    Azure is shown.
    """
    return re.sub(_OPTION, _hide_option, re.sub(_CREDENTIALS, _hide_credentials, text))


def _hide_credentials(match: re.Match[str]) -> str:
    if match[1].lower() in _CONTAINER_FIRST and re.fullmatch(_CONTAINER, match[3]):
        return match[0]
    return f"{match[1]}{match[2]}***@"


def _hide_option(match: re.Match[str]) -> str:
    return (
        match[0]
        if match[2] in S3_OPTIONS and "@" not in unquote(match[3])
        else f"{match[1]}{match[2]}=***"
    )


def _forms() -> str:
    return "a path, file:///PATH, memory://NAME or s3://BUCKET/PREFIX"


def _refuse_credentials(text: str, scheme: str, rest: str) -> None:
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    # A secret key with a slash in it leaves its `@` in the path, but its `:` in the authority.
    if "@" in authority or (":" in authority and "@" in rest):
        raise InvalidLocation(
            "credentials in a URL",
            where=redact(text),
            hint=f"Remove them, and {_INSTEAD.get(scheme, _INSTEAD_OF_OTHERS)}; if this URL was "
            "logged or shared, replace them.",
        )


def _parse_path(text: str) -> Location:
    nearly = _NEARLY_URL.match(text)
    if nearly is not None and (nearly[2] or nearly[1].lower() in _MISTYPED):
        raise InvalidLocation(
            "neither a URL nor a plain path",
            where=redact(text),
            expected=f"{nearly[1]}://...",
            hint=f"Write ./{nearly[1]}:... if a folder of that name is meant.",
        )
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidLocation("no home folder to expand '~' to", where=text) from error
    try:
        whole = os.path.abspath(path)  # noqa: PTH100 - no resolving of links
    except OSError as error:
        raise InvalidLocation(
            "a relative path, but the current folder is gone",
            where=text,
            hint="Go to another folder, or give an absolute path.",
        ) from error
    return Location("file", path=whole)


def _parse_file(text: str) -> Location:
    parts = _split(text)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidLocation(
            "not a folder of this machine", where=text, expected="file:///ABSOLUTE/PATH"
        )
    _refuse_options(text, parts.query, known=())
    _refuse_fragment(text, parts.fragment)
    path = unquote(parts.path, errors="surrogateescape")
    if "\0" in path:
        raise InvalidLocation("a NUL in a path", where=text)
    return Location("file", path=os.path.abspath(path))  # noqa: PTH100 - no resolving of links


def _parse_foreign(text: str, scheme: str, rest: str) -> Location:
    if scheme not in _CONTAINER_FIRST or ":" in rest.partition("/")[0]:
        _refuse_credentials(text, scheme, rest)
    if scheme in _WITHOUT_QUERY and "?" in rest:
        raise InvalidLocation(
            "a '?' in a URL",
            where=redact(text),
            expected=f"{scheme}://NAME/PREFIX",
            hint="Give options, such as sas_token, as storage options or in the environment.",
        )
    return Location(scheme, path=rest.rstrip("/"))


def _parse_memory(text: str) -> Location:
    parts = _split(text)
    _refuse_options(text, parts.query, known=())
    _refuse_fragment(text, parts.fragment)
    name = (parts.netloc + parts.path).strip("/")
    if not name:
        raise InvalidLocation("a memory store needs a name", where=text, expected="memory://NAME")
    return Location("memory", name=check_key(name))


def _parse_s3(text: str) -> Location:
    parts = _split(text)
    options = _refuse_options(text, parts.query, known=S3_OPTIONS)
    _refuse_fragment(text, parts.fragment)
    if not re.fullmatch(_BUCKET, parts.netloc):
        raise InvalidLocation(
            "no bucket is named" if not parts.netloc else "not a bucket name",
            where=redact(text),
            expected="s3://BUCKET/PREFIX",
        )
    prefix = parts.path.strip("/")
    if any(segment in ("", ".", "..") for segment in prefix.split("/")) and prefix:
        raise InvalidLocation("an empty, '.' or '..' segment in a prefix", where=redact(text))
    endpoint = options.get("endpoint_url")
    if endpoint is not None:
        check_endpoint(text, endpoint)
    return Location("s3", parts.netloc, prefix, endpoint, options.get("region"))


def _split(text: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError:
        # Without the cause, which repeats what is between the brackets.
        raise InvalidLocation(
            "brackets that hold no IPv6 address", where=redact(text), expected=_forms()
        ) from None


def check_endpoint(text: str, endpoint: str) -> None:
    """Check the address of a server, which the URL `text` or its options name.

    Raises:
        InvalidLocation: It is none.
    """
    parts = _split(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in endpoint:
        raise InvalidLocation(
            "endpoint_url is not the address of a server",
            where=redact(text.partition("?")[0]),
            expected="http://HOST:PORT or https://HOST, without credentials",
        )


def _refuse_options(text: str, query: str, *, known: tuple[str, ...]) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    names = [name for name, _ in pairs]
    bad = [name for name in names if name not in known or names.count(name) > 1]
    if bad or not all(value for _, value in pairs):
        raise InvalidLocation(
            "options that are unknown, empty or given twice",
            where=redact(text),
            expected=" and ".join(known) if known else "no options",
            found=", ".join(sorted(set(bad or names))),
        )
    return dict(pairs)


def _refuse_fragment(text: str, fragment: str) -> None:
    if fragment:
        raise InvalidLocation("a '#' in a URL", where=redact(text), expected=_forms())
