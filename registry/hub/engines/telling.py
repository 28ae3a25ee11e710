"""Tell an inference engine to load a folder, by its own requests over HTTP.

The URL comes from whoever starts the follower, never from a run. No redirect is followed, no
link-local address is asked (such as those where a cloud keeps the credentials of a machine), no
proxy of the environment is used, and an answer is read up to a bound.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from holdfast.backends.escape import printable
from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.hub.engines.folder import FollowedVersion

#: What becomes of the requests that an engine is answering when new weights come.
Requests = Literal["wait", "pause", "abort"]
#: How engines are told: `sglang` or `vllm`, or a call.
Notify = str | Callable[[FollowedVersion], object]
KEY_VARIABLE = "HOLDFAST_ENGINE_KEY"
_ANSWER_BYTES = 2**20
_DIGESTS_BYTES, _HASHING_S = 2**26, 600.0  # some 150 bytes for each tensor of each rank
_DIGEST = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")
#: A tensor as vLLM names it, such as `dp0:pp0:pcp0:tp1:lm_head.weight`.
_RANK = re.compile(r"((?:tp(\d{1,4}):|[a-z]+\d+:)*)(.+)")
_NOT_TAKEN = "the engine has not taken the weights"
_NO_DIGESTS = "the engine gives no digests of its weights"
_SAID_CHARACTERS = 300
_CONNECT_S = 10.0


def key_of(file: Path | None) -> str | None:
    """Return the key for the engines: the first line of a file, or `HOLDFAST_ENGINE_KEY`."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        with file.open("rb") as opened:
            lines = opened.read(_ANSWER_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("the key cannot be read", where=file, found=error) from error
    if not lines or not lines[0].strip():
        raise InvalidInput("no key", where=file, expected="a key in the first line")
    return lines[0].strip()


class EngineTensor(NamedTuple):
    """A tensor that a rank of an engine has."""

    key: str  # rank and name, such as `dp0:pp0:pcp0:tp1:lm_head.weight`
    name: str
    digest: str  # hex: SHA-256 of its bytes, or the first 64 bits of that, or a hash of SGLang's
    part: int  # number of the rank among those that share its tensors
    parts: int  # number of these


class Program:
    """A call in place of an engine, such as of a program that restarts one."""

    name = "program"

    def __init__(self, call: Callable[[FollowedVersion], object]) -> None:
        self._call = call

    def tell(self, version: FollowedVersion) -> None:
        """Have a version loaded, and return once it is in use."""
        self._call(version)

    def loaded(self) -> str | None:
        """Return the version that the engine says it has; `None` where it cannot say."""
        return None

    def resume(self) -> None:
        """Have it go on: a try that was broken off after the load has left it paused."""


class _Served:
    """An engine at a URL; `Program` describes its other methods."""

    _is_private = False  # whether it is asked on private networks alone

    def __init__(self, url: str, key: str | None, timeout_s: float, requests: Requests) -> None:
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidInput("the key has characters that no header can hold")
        self._key, self._timeout_s, self._requests = key, timeout_s, requests
        expected = "http://HOST:PORT, or https"
        refused = InvalidInput("not the URL of an engine", where="--url", expected=expected)
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise refused from error
        if parts.username is not None or parts.password is not None:
            refused.found = "a user or password in it"  # which is not repeated
            raise refused
        has_more = parts.query or parts.fragment or not (url.isascii() and url.isprintable())
        if parts.scheme not in ("http", "https") or not self._host or has_more or " " in url:
            refused.found = printable(url)
            raise refused
        self.name, self._base = url.rstrip("/"), parts.path.rstrip("/")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        try:
            addresses = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except UnicodeError as error:  # no name of a host: a part is empty or too long
            raise refused from error
        except OSError:
            return  # a host may get its name later: each connection is looked at anyway
        for *_, address in addresses:
            self._check(str(address[0]))

    def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return status and answer."""
        return self._ask("GET", path, None, _CONNECT_S)

    def post(
        self, path: str, body: object, most: int = _ANSWER_BYTES
    ) -> tuple[int, dict[str, Any]]:
        """Return status and answer; the answer of something else than an object is empty."""
        return self._ask("POST", path, body, self._timeout_s, most)

    def _require(self, path: str, body: object) -> None:
        """Ask for something that must succeed."""
        status, answer = self.post(path, body)
        if status != 200:
            raise self.refused(path, status, answer)

    def refused(
        self, path: str, status: int, answer: Mapping[str, Any], what: str = _NOT_TAKEN
    ) -> RegistryError:
        """Return the error of an answer."""
        found = answer.get("message") or answer.get("error") or answer.get("detail") or ""
        said = self._without_key(" ".join(str(found).split()))
        hint = "Redirects are not followed." if 300 <= status < 400 else None
        if status == 404 and self._is_private:
            hint = "vLLM has this request only with VLLM_SERVER_DEV_MODE=1."
        return RegistryError(
            what,
            where=f"{self.name}{path}",
            expected="status 200",
            found=f"status {status}{said and ': '}{said[:_SAID_CHARACTERS]}",
            hint=hint,
        )

    def _without_key(self, said: str) -> str:
        """Return words of an engine or a library, to be shown."""
        return printable(said.replace(self._key, "***") if self._key else said)

    def _ask(
        self, method: str, path: str, body: object, timeout_s: float, most: int = _ANSWER_BYTES
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Accept": "application/json", "Connection": "close"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        connection = self._kind(self._host, self._port, timeout=_CONNECT_S)
        until_s = time.monotonic() + timeout_s
        late = threading.Timer(timeout_s, lambda: _cut(sock))  # an answer may come byte by byte
        try:
            connection.connect()
            sock = connection.sock
            self._check(str(sock.getpeername()[0]))  # a name may lead elsewhere by now
            sock.settimeout(timeout_s)
            late.start()
            connection.request(method, f"{self._base}{path}", data, headers)
            with connection.getresponse() as answer:
                said = answer.read(most + 1)
            if time.monotonic() >= until_s:  # it may have been cut
                raise TimeoutError
        except (OSError, HTTPException) as error:
            why = self._without_key(f"{type(error).__name__}: {error}")[:_SAID_CHARACTERS]
            if time.monotonic() >= until_s:
                why = f"no whole answer within {timeout_s:g} s"
            raise RegistryError("the engine does not answer", where=self.name, found=why) from None
        finally:
            late.cancel()
            connection.close()
        if len(said) > most:
            where, expected = f"{self.name}{path}", f"at most {most} bytes"
            raise RegistryError("the answer is too long", where=where, expected=expected)
        document: object = None
        with suppress(ValueError, RecursionError):
            document = json.loads(said)
        return answer.status, document if isinstance(document, dict) else {}

    def _check(self, text: str) -> None:
        """Refuse an address that no engine of this kind has."""
        address: IPv4Address | IPv6Address = ip_address(text.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_link_local:
            raise InvalidInput("a link-local address", where=self.name, found=address)
        if self._is_private and not address.is_private:
            expected = "an address of a private network: its requests can run anything in vLLM"
            raise InvalidInput(
                "a public address", where=self.name, expected=expected, found=address
            )


class _SGLang(_Served):
    """SGLang: `/update_weights_from_disk`. If that fails, SGLang itself takes its weights back."""

    hashing = "/weights_checker"

    def tell(self, version: FollowedVersion) -> None:
        if self._requests == "pause":
            # Running requests compute their cache again, with the new weights.
            self._require("/pause_generation", {"mode": "retract"})
        body = {
            "model_path": version.folder,
            "weight_version": version.id,
            "abort_all_requests": self._requests == "abort",
            "flush_cache": True,
        }
        # Without an answer the engine stays paused: nobody knows what it has loaded.
        status, answer = self.post("/update_weights_from_disk", body)
        self.resume()
        if status != 200 or answer.get("success") is not True:
            raise self.refused("/update_weights_from_disk", status, answer)

    def loaded(self) -> str | None:
        for path in ("/model_info", "/get_weight_version"):  # the second one before 0.5.15
            status, answer = self._get(path)
            if status == 200:
                return str(answer.get("weight_version", ""))
        return None

    def resume(self) -> None:
        if self._requests == "pause":
            self._require("/continue_generation", {})

    def digests(self, answer: Mapping[str, Any]) -> Iterator[EngineTensor]:
        for number, rank in enumerate(answer["ranks"]):
            about = rank["parallelism_info"][0]
            parts = range(10_000)[about["tp_size"]]  # a whole number, or an error
            part = range(parts)[about["tp_rank"]]
            for name, digest in rank["checksums"].items():
                key = printable(f"rank{number}:{name}")
                yield EngineTensor(key, name, digest, part, parts)


class _VLLM(_Served):
    """vLLM with `VLLM_SERVER_DEV_MODE=1`: `reload_weights` by `/collective_rpc`.

    A reload that fails may leave some weights of each version, so vLLM then stays paused until one
    succeeds. It is given the folder of the version: a path that it has read before may be answered
    from a cache.
    """

    hashing, _is_private = "/weight_checker", True
    _MODES: Mapping[Requests, str] = {"wait": "wait", "pause": "keep", "abort": "abort"}

    def tell(self, version: FollowedVersion) -> None:
        self._require(f"/pause?mode={self._MODES[self._requests]}", None)
        self._name(f"loading-{version.id}")  # what a reload that fails leaves is no version
        reload = {"method": "reload_weights", "kwargs": {"weights_path": version.folder}}
        self._require("/collective_rpc", reload)
        # Requests that are frozen would go on with what they have computed by the old weights.
        frozen = "?reset_running_requests=true" if self._requests == "pause" else ""
        self._require(f"/reset_prefix_cache{frozen}", None)
        self._name(version.id)
        self.resume()

    def loaded(self) -> str | None:
        status, answer = self._get("/weight_info")
        return str(answer.get("weight_version", "")) if status == 200 else None

    def resume(self) -> None:
        self._require("/resume", None)

    def digests(self, answer: Mapping[str, Any]) -> Iterator[EngineTensor]:
        found = [(*_RANK.findall(key)[0], one) for key, one in answer["checksums"].items()]
        parts = 1 + max(int(part or 0) for _, part, *_ in found)
        for rank, part, name, digest in found:
            yield EngineTensor(printable(rank + name), name, digest, int(part or 0), parts)

    def _name(self, version: str) -> None:
        status, answer = self.post("/update_weight_version", {"new_version": version})
        if status not in (200, 404):  # older ones cannot keep it
            raise self.refused("/update_weight_version", status, answer)


def _cut(sock: socket.socket) -> None:
    """End a connection that another thread reads."""
    with suppress(OSError):  # it has ended
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


Engine = Program | _SGLang | _VLLM
_KINDS: Mapping[str, type[_SGLang | _VLLM]] = {"sglang": _SGLang, "vllm": _VLLM}


def engines_at(
    notify: Notify, urls: Sequence[str], key: str | None, requests: Requests, answer_s: float
) -> list[Engine]:
    """Return the engines at some URLs, or the call in place of one."""
    if callable(notify):
        if urls or key is not None:
            raise InvalidInput("a program has no URL and no key", expected="sglang or vllm")
        return [Program(notify)]
    if notify not in _KINDS:
        raise InvalidInput("no such engine", where=notify, expected="sglang or vllm")
    if not urls or len(set(urls)) < len(urls):
        what, expected = "not the URLs of engines", "one or more, each once"
        raise InvalidInput(what, expected=expected, found=", ".join(urls))
    return [_KINDS[notify](one, key, answer_s, requests) for one in urls]


def digests_at(url: str, key: str | None) -> tuple[str, str | None, list[EngineTensor]]:
    """Have an engine hash its tensors; return its kind, what it was told, and the digests."""
    for kind, kind_of in _KINDS.items():
        engine = kind_of(url, key, _HASHING_S, "wait")
        told, found = engine.loaded(), list[EngineTensor]()
        status, answer = engine.post(engine.hashing, {"action": "checksum"}, _DIGESTS_BYTES)
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            usable = engine.digests(answer if status == 200 else {})
            found = [one for one in usable if _DIGEST.fullmatch(one.digest)]
        if found and engine.loaded() == told:
            return kind, told, found
        if status != 404:
            what = "the engine was told of other weights meanwhile" if found else _NO_DIGESTS
            raise engine.refused(engine.hashing, status, answer, what)
    hint = "SGLang 0.5.23 and vLLM 0.32 do; vLLM only with VLLM_SERVER_DEV_MODE=1."
    raise RegistryError(_NO_DIGESTS, where=url, hint=hint)
