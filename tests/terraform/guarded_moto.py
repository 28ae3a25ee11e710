"""Serve moto's S3 behind a guard that judges every request by policies, conditions included.

moto's own IAM ignores conditions. This guard knows those of the policies (`evaluation`), and with
them what S3 does besides: whoever may not list gets 403 for what is absent. `PUT /guard/KEY` tells
which policies an access key has, as a JSON list; keys that it was not told of may do everything.

There is no TLS here: a request to `127.0.0.1` passes for one over TLS, one to `localhost` does not.
"""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.servers.moto_process import moto, serve
from tests.terraform.evaluation import Call, allowed

Environment = dict[str, Any]
Answer = Iterable[bytes]

_REFUSAL = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>guard</Message></Error>"


class Guard:
    """A WSGI application before another one."""

    def __init__(self, inner: Callable[..., Answer]) -> None:
        self._inner = inner
        self._turn = threading.Lock()
        self._documents: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, environ: Environment, start: Callable[..., Any]) -> Answer:
        with self._turn:  # moto checks and then acts; one by one that is exclusive
            if environ["PATH_INFO"].startswith("/guard/"):
                body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                self._documents[environ["PATH_INFO"].removeprefix("/guard/")] = json.loads(body)
                start("204 No Content", [])
                return []
            documents = self._documents.get(_access_key(environ))
            if documents is None:
                return list(self._inner(environ, start))
            return self._judged(documents, environ, start)

    def _judged(
        self, documents: list[dict[str, Any]], environ: Environment, start: Callable[..., Any]
    ) -> Answer:
        if environ["REQUEST_METHOD"] == "POST" and environ["QUERY_STRING"] == "delete":
            return self._deleted(documents, environ, start)
        call = _call(environ)
        asked = [call]
        if "HTTP_X_AMZ_TAGGING" in environ:  # a put that names tags takes both rights
            asked.append(Call("s3:PutObjectTagging", call.resource, call.context))
        if not all(allowed(documents, one) for one in asked):
            return _refuse(environ, start)
        heads: list[tuple[Any, ...]] = []
        body = list(self._inner(environ, lambda *head: heads.append(head)))
        bucket, key = _address(environ)
        listing = Call(
            "s3:ListBucket", f"arn:aws:s3:::{bucket}", {**_context(environ), "s3:prefix": key}
        )
        if key and heads[0][0].startswith("404") and not allowed(documents, listing):
            return _refuse(environ, start)
        start(*heads[0])
        return body

    def _deleted(
        self, documents: list[dict[str, Any]], environ: Environment, start: Callable[..., Any]
    ) -> Answer:
        """Delete many objects as S3 does: each is judged as if it were the only one."""
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])).decode()
        bucket, _ = _address(environ)
        results = []
        for key in re.findall(r"<Key>(.*?)</Key>", body):
            one = environ | {
                "REQUEST_METHOD": "DELETE",
                "PATH_INFO": f"/{bucket}/{key}",
                "RAW_URI": f"/{bucket}/{key}",
                "QUERY_STRING": "",
                "CONTENT_LENGTH": "0",
                "wsgi.input": io.BytesIO(),
            }
            if allowed(documents, _call(one)):
                list(self._inner(one, lambda *_: None))
                results.append(f"<Deleted><Key>{key}</Key></Deleted>")
            else:
                results.append(f"<Error><Key>{key}</Key><Code>AccessDenied</Code></Error>")
        answer = f"<DeleteResult>{''.join(results)}</DeleteResult>".encode()
        start("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]


def _call(environ: Environment) -> Call:
    bucket, key = _address(environ)
    query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    context = _context(environ)
    arn = f"arn:aws:s3:::{bucket}"
    method = environ["REQUEST_METHOD"]
    if not key:
        if "prefix" in query:
            context["s3:prefix"] = query["prefix"][0]
        if method == "GET" and "list-type" in query:
            return Call("s3:ListBucket", arn, context)
        if method == "GET" and "versioning" in query:
            return Call("s3:GetBucketVersioning", arn, context)
        # Whatever is done to the bucket itself: no policy names it, so only `s3:*` allows it.
        return Call(f"s3:{method}Bucket?{environ['QUERY_STRING']}", arn, context)
    if "HTTP_IF_NONE_MATCH" in environ:
        context["s3:if-none-match"] = environ["HTTP_IF_NONE_MATCH"]
    for name, value in environ.items():
        if name.startswith("HTTP_X_AMZ_SERVER_SIDE_ENCRYPTION"):
            context[f"s3:{name[5:].lower().replace('_', '-')}"] = value
    if method == "POST" and "restore" in query:
        return Call("s3:RestoreObject", f"{arn}/{key}", context)
    verb = {"GET": "Get", "HEAD": "Get", "PUT": "Put", "POST": "Put", "DELETE": "Delete"}[method]
    version = "Version" if "versionId" in query else ""
    return Call(f"s3:{verb}Object{version}", f"{arn}/{key}", context)


def _context(environ: Environment) -> dict[str, str]:
    plain = environ["HTTP_HOST"].startswith("localhost")
    return {"aws:SecureTransport": "false" if plain else "true"}


def _address(environ: Environment) -> tuple[str, str]:
    path = unquote(environ["RAW_URI"].partition("?")[0])
    bucket, _, key = path.removeprefix("/").partition("/")
    return bucket, key


def _access_key(environ: Environment) -> str:
    found = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    return found[1] if found else ""


def _refuse(environ: Environment, start: Callable[..., Any]) -> Answer:
    # What is left of the body would be taken for the next request.
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    head = environ["REQUEST_METHOD"] == "HEAD"
    start("403 Forbidden", [("Content-Length", "0" if head else str(len(_REFUSAL)))])
    return [] if head else [_REFUSAL]


def main() -> None:
    serve(Guard(moto()))


if __name__ == "__main__":
    main()
