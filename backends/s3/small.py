"""The store in an S3 bucket whose small objects obstore moves; boto3 does everything else.

obstore gets one attempt, and its answer counts only if it proves that the store gave it. Otherwise
boto3 sends the request: errors, repeats and deadlines are those of `S3Backend`.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from holdfast.backends.base import Body, ByteRange, as_buffers, check_into, check_key
from holdfast.backends.errors import InvalidLocation, ObjectNotFound
from holdfast.backends.limits import max_record_bytes
from holdfast.backends.s3.backend import S3Backend
from holdfast.backends.s3.body import fill
from holdfast.backends.s3.errors import translated
from holdfast.backends.s3.proof import NotProven, check_got
from holdfast.backends.s3.settings import BUCKET_OWNER

# Larger objects gain nothing, and boto3 can be interrupted.
_PUT_BYTES, _GET_BYTES = 64 * 1024, 256 * 1024
_REST_S = 30.0  # boto3 works alone after an answer that is not the store's
# These options of the client tune boto3 alone.
_TAKEN = {"connect_timeout", "read_timeout", "tcp_keepalive", "max_pool_connections"}
# obstore reads the second one; boto3 does not, and could not read what is encrypted so.
_NAMES = (BUCKET_OWNER, "AWS_SERVER_SIDE_ENCRYPTION")
# Status and code of a whole error of the store, in a text of obstore.
_ERROR = r"(?:<\?xml[^>]*>)?\s*<Error[\s>].*?<Code>(\w+)</Code>.*</Error>\s*\n\n"
_TOLD = re.compile(rf"(?s)status code: (404|409|412|416) [\w ]+: {_ERROR}")
# obstore's threads do not live on in a forked child, where a call would never return.
_PROCESS = os.getpid()
_LOGGER = logging.getLogger("holdfast")


class SmallObjectsBackend(S3Backend):
    """Objects of a bucket under a prefix; obstore puts and reads the small ones."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._small: S3Store | None = None
        self._place = ("", "")  # the address of the bucket and the region, as boto3 found them
        self._rests_until_s = 0.0
        refused = [*sorted(set(self._settings.config) - _TAKEN), *filter(os.environ.get, _NAMES)]
        with translated(self.url):
            endpoint = self._client().meta.endpoint_url
        if endpoint.startswith("https:") and isinstance(self._verify, str):
            refused.append(f"certificates of {self._verify}")
        if refused:
            what, hint = "options that obstore cannot keep to", "Leave out transport='obstore'."
            raise InvalidLocation(what, where=self.url, found=", ".join(refused), hint=hint)

    def get(self, key: str, byte_range: ByteRange | None = None, *, into: Any = None) -> bytes:
        """Read an object, or a range of it."""
        views, name = check_into(byte_range, into), self._prefix + check_key(key)
        if byte_range is None or len(byte_range) <= _GET_BYTES:
            found: bytes | None = self._try(key, lambda store: _read(store, name, byte_range))
            if found is not None:
                fill(io.BytesIO(found), views)
                return found if into is None else b""
        return super().get(key, byte_range, into=into)

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object, atomically and durably."""
        buffers = as_buffers(body)
        if not self._put_small(key, buffers, "overwrite"):
            super().put(key, buffers)

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; False may mean that its own answer was lost."""
        buffers = as_buffers(body)
        made = self._put_small(key, buffers, "create")
        return super().put_if_absent(key, buffers) if made is None else made

    def close(self) -> None:
        """Release the connections; a later call opens new ones."""
        self._small = None
        super().close()

    def _put_small(self, key: str, buffers: Sequence[memoryview], mode: Any) -> Any:
        """Return whether the store made the object; None if boto3 has to put it."""
        name = self._prefix + check_key(key)
        # boto3 adds the options of puts, the class of packs and the type of pages.
        special = self._settings.puts or (self._settings.packs and key.startswith("packs/"))
        if special or key.endswith(".html") or sum(map(len, buffers)) > _PUT_BYTES:
            return None
        data = b"".join(buffers)

        def ask(store: S3Store) -> bool:
            said = obstore.put(store, name, data, mode=mode, use_multipart=False)
            # obstore shows nothing else of the answer, and a page in its place cannot know this.
            if said["e_tag"] != f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"':
                raise NotProven("an ETag that is not the MD5 of the object")
            return True

        return self._try(key, ask)

    def _try(self, key: str, ask: Callable[[S3Store], Any]) -> Any:
        """Return what obstore has done, with proof; None if boto3 has to ask."""
        # boto3 also gets the first answer: it finds the address and the region.
        rests = time.monotonic() < self._rests_until_s or os.getpid() != _PROCESS
        if rests or not (self._answered and self._place[0]):
            return None
        try:
            return ask(self._store())
        except Exception as error:
            told = _TOLD.search(str(error))
            match told and told.groups():
                case ("404", "NoSuchKey"):
                    raise ObjectNotFound("no such object", where=self._where(key)) from None
                case ("412", "PreconditionFailed"):
                    return False
                case None:
                    self._small, self._rests_until_s = None, time.monotonic() + _REST_S
                    said = "%s: no proof through obstore (%s): boto3 moves small objects for %.0f s"
                    _LOGGER.warning(said, self.url, type(error).__name__, _REST_S)
            return None

    def _store(self) -> S3Store:
        made, (url, region), keys = self._small, self._place, self._keys
        if made is None:
            client: Any = {"allow_http": url.startswith("http:"), "timeout": timedelta(seconds=5)}
            made = self._small = S3Store(
                self._bucket,
                # These replace what obstore reads of the environment.
                endpoint=url,
                aws_endpoint_url_s3=url,
                virtual_hosted_style_request=True,  # the address has the bucket in it
                region=region,
                skip_signature=not region,
                request_payer=bool(self._settings.requests),
                credential_provider=(lambda: _newest(keys)) if region else None,
                client_options=client | {"allow_invalid_certificates": self._verify is False},
                retry_config={"max_retries": 0},
            )
        return made

    def _make(self) -> Any:
        client: Any = super()._make()
        self._host = urlsplit(client.meta.endpoint_url).netloc
        client.meta.events.register_last("before-send.s3", self._note)
        self._verify = client._endpoint.http_session._verify
        self._keys = client._request_signer._credentials
        return client

    def _note(self, request: Any, **_: object) -> None:
        """Note the address of the bucket in a request of boto3, and the region it is signed for."""
        url, bucket = urlsplit(request.url), self._bucket
        in_path = f"{url.path}/".startswith(f"/{bucket}/")
        in_host = url.netloc.startswith(f"{bucket}.") and url.netloc != self._host
        if in_path != in_host:
            signed = repr(request.headers.get("Authorization"))
            found = re.search(r"Credential=[^,]*?/\d{8}/([^/,]+)/s3/", signed)
            folder = f"/{bucket}" if in_path else ""
            self._place = (f"{url.scheme}://{url.netloc}{folder}", found[1] if found else "")


def _read(store: S3Store, name: str, byte_range: ByteRange | None) -> bytes | None:
    """Return an object or a range of it, with proof; None if boto3 has to read it."""
    part: Any = {"range": (byte_range.start, byte_range.stop)} if byte_range else None
    answer = obstore.get(store, name, options=part)
    start, stop = answer.range
    if stop - start > min(_GET_BYTES, max_record_bytes()):
        return None
    data = bytes(answer.bytes())
    headers = {
        "etag": answer.meta["e_tag"] or "",
        "content-length": str(len(data)),
        "content-encoding": answer.attributes.get("Content-Encoding", ""),
        "content-range": f"bytes {start}-{stop - 1}/{answer.meta['size']}",
    }
    check_got(206 if byte_range else 200, headers, byte_range)  # obstore refuses any other status
    return data if len(data) == (len(byte_range) if byte_range else stop) else None


def _newest(keys: Any) -> Any:
    """Return credentials of boto3, which renews them in time; obstore soon asks again."""
    names = ("access_key_id", "secret_access_key", "token")
    found = zip(names, keys.get_frozen_credentials(), strict=False)
    return dict(found) | {"expires_at": datetime.now(UTC)}
