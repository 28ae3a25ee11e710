"""Translate errors of an S3 server or its SDK into errors of Holdfast.

| error of S3 | error |
|---|---|
| NoSuchKey | ObjectNotFound |
| NoSuchBucket, InvalidBucketName, wrong region, 301 | InvalidLocation |
| InvalidRange | ObjectTruncated |
| InvalidObjectState, ObjectNotInActiveTierError | Archived |
| AccessDenied, 403, bad or missing credentials, KMS, clock skew | AccessDenied |
| QuotaExceeded, EntityTooLarge, 507 | StoreFull |
| NotImplemented | StoreUnsuitable |
| SlowDown, 429, 5xx, timeouts, broken connections, BadDigest | StoreUnavailable |
| an answer that cannot be read, or without proof (`s3.proof`) | StoreUnavailable |
| anything else | StorageError |
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from botocore import exceptions as sdk
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from holdfast.backends.errors import (
    AccessDenied,
    Archived,
    Hint,
    InvalidLocation,
    ObjectNotFound,
    ObjectTruncated,
    StorageError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from holdfast.backends.patience import not_proven, unanswered
from holdfast.backends.s3.proof import NotProven, Redirected
from holdfast.backends.s3.settings import BUCKET_OWNER

_CREDENTIALS = {
    "ExpiredToken": "the credentials have expired",
    "ExpiredTokenException": "the credentials have expired",
    "TokenRefreshRequired": "the credentials have expired",
    "InvalidToken": "the session token is not valid",
    "InvalidAccessKeyId": "the access key is not known",
    "SignatureDoesNotMatch": "the secret key does not fit the access key",
    "InvalidClientTokenId": "the access key is not known",
    "AuthFailure": "the credentials are refused",
}
_PLACES = {
    "InvalidBucketName": "not a bucket name",
    "PermanentRedirect": "the bucket is in another region",
    "TemporaryRedirect": "the bucket is in another region",
    "IllegalLocationConstraintException": "the bucket is in another region",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
}
_FULL = {
    "QuotaExceeded": "the quota of the bucket or its owner is used up",
    "InsufficientCapacity": "the store is full",
    "EntityTooLarge": "the object is too large for one request",
    "XMinioStorageFull": "the store is full",
}
# For a read and for a copy.
_ARCHIVED = ("InvalidObjectState", "ObjectNotInActiveTierError")
_BUSY = {
    *("SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests"),
    *("RequestLimitExceeded", "InternalError", "ServiceUnavailable", "OperationAborted"),
    *("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "InvalidDigest"),
    "IncompleteBody",
}
_NO_CREDENTIALS = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.CredentialRetrievalError,
    sdk.TokenRetrievalError,
    sdk.UnauthorizedSSOTokenError,
    sdk.SSOError,
    sdk.ProfileNotFound,
)
_BRING_BACK = Hint(
    "Ask for it by `reg.tier([ref], restore_days=7)`, and read it some hours later.",
    "Ask for it by `holdfast tier REF --restore-days 7`, and read it some hours later.",
)
_HOW_TO_LOG_IN = (
    "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), "
    "or log in again."
)


@contextmanager
def translated(where: str, *, writes: bool = False) -> Iterator[None]:
    """Turn errors of the SDK into ours.

    Args:
        where: The URL of the object or bucket.
        writes: Whether the request changes the store.
    """
    try:
        yield
    except ClientError as error:
        raise _of_server(error, where, writes) from error
    except BotoCoreError as error:
        raise _of_sdk(error, where, writes) from error
    except StorageError:
        raise
    except Redirected as error:
        raise _elsewhere(str(error), where) from error
    except NotProven as error:
        raise not_proven(str(error), where, writes=writes) from error
    except (ValueError, TypeError, RuntimeError) as error:
        # The SDK's parsers raise them for bad numbers and times, for parts in place of a text, and
        # for XML that nests too deeply.
        raise not_proven(f"an answer that cannot be read: {error}", where, writes=writes) from error
    except (HTTPError, EOFError, OSError) as error:
        raise _no_answer(error, where, writes) from error


def error_code(error: ClientError) -> str:
    """Return the server's name of an error, or its HTTP status if the answer had no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def of_object(code: str, message: str, where: str) -> StorageError:
    """Return the error of one object of a request for many."""
    status = 403 if code == "AccessDenied" else 0
    parts: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return _of_server(ClientError(parts, "DeleteObjects"), where, writes=True)


def is_absent(error: ClientError) -> bool:
    """Return whether the server answered that there is no such object."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return error_code(error) == "NoSuchKey" and status == 404


def _of_server(error: ClientError, where: str, writes: bool) -> StorageError:
    code = error_code(error)
    details = error.response.get("Error", {})
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    said = f"{code}: {details.get('Message') or 'no message'} (HTTP {status})"
    if code == "NoSuchBucket":
        return InvalidLocation(
            "no such bucket", where=where, hint="Create it first, or check the spelling."
        )
    if is_absent(error):
        return ObjectNotFound("no such object", where=where)
    if code in _PLACES:
        return InvalidLocation(
            _PLACES[code], where=where, found=said, hint="Give ?region=NAME or set AWS_REGION."
        )
    if status in (301, 302, 303, 307, 308):
        return _elsewhere(said, where)
    if code == "InvalidRange":
        return ObjectTruncated("the object ends before the range begins", where=where, found=said)
    if code in _ARCHIVED:
        return Archived("the object is in an archive", where=where, found=said, hint=_BRING_BACK)
    if code in _FULL or status == 507:
        return StoreFull(_FULL.get(code, "the store is full"), where=where, found=said)
    if code == "NotImplemented":
        return StoreUnsuitable(
            "the store does not support a condition that Holdfast needs", where=where, found=said
        )
    if code == "ConditionalRequestConflict":
        return StoreUnavailable(
            "each attempt met another write of the same key",
            where=where,
            found=said,
            hint="Try again.",
        )
    if code in _BUSY or status == 429 or status >= 500:
        return unanswered(said, where, writes=writes, advice="")
    if (not code or code.isdigit()) and error.operation_name != "HeadObject":
        # The SDK gives the status if it cannot read the body as an error.
        return not_proven(said, where, writes=writes)
    return _denied(error, code, status, said, where) or StorageError(
        "the store refused the request", where=where, found=said
    )


def _denied(
    error: ClientError, code: str, status: int, said: str, where: str
) -> AccessDenied | None:
    if code == "RequestTimeTooSkewed":
        return _skewed(error, where)
    if code in _CREDENTIALS:
        return AccessDenied(_CREDENTIALS[code], where=where, found=said, hint=_HOW_TO_LOG_IN)
    if code.startswith("KMS") or "kms:" in said:
        return AccessDenied(
            "the key that encrypts the bucket is refused",
            where=where,
            found=said,
            hint="The role needs kms:GenerateDataKey to write and kms:Decrypt to read.",
        )
    if status in (401, 403):
        return AccessDenied("access is denied", where=where, found=said, hint=_missing_right())
    if code == "400":
        # The answer to a HEAD has no body to say more.
        return AccessDenied(
            "a request was refused without a reason; often the credentials have expired",
            where=where,
            hint=_HOW_TO_LOG_IN,
        )
    return None


def _missing_right() -> str:
    hint = (
        "The role needs s3:GetObject and s3:ListBucket (without the latter an absent object looks "
        "forbidden), and s3:PutObject to write."
    )
    owner = os.environ.get(BUCKET_OWNER)
    return f"{hint} The bucket must belong to {owner} ({BUCKET_OWNER})." if owner else hint


def _skewed(error: ClientError, where: str) -> AccessDenied:
    # Only this error has these members.
    details: dict[str, Any] = dict(error.response.get("Error", {}))
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    ahead_s = _ahead_s(details.get("ServerTime"), headers.get("date"))
    differ = "differ too much" if ahead_s is None else f"differ by {abs(ahead_s):.0f} s"
    ahead = "" if ahead_s is None else f"; ours is {'ahead' if ahead_s > 0 else 'behind'}"
    return AccessDenied(
        f"the clocks of this machine and of the store {differ}{ahead}",
        where=where,
        expected="at most 900 s",
        hint="Set this machine's clock (NTP).",
    )


def _ahead_s(server_time: str | None, date: str | None) -> float | None:
    """Return by how many seconds our clock is ahead, if the answer has the server's time."""
    try:
        if server_time:
            theirs = datetime.fromisoformat(server_time)
        elif date:
            theirs = parsedate_to_datetime(date)
        else:
            return None
        return (datetime.now(UTC) - theirs).total_seconds()
    except (ValueError, TypeError):
        return None


def _of_sdk(error: BotoCoreError, where: str, writes: bool) -> StorageError:
    if isinstance(error, _NO_CREDENTIALS):
        return AccessDenied("no usable credentials", where=where, found=error, hint=_HOW_TO_LOG_IN)
    if isinstance(error, (sdk.NoRegionError, sdk.InvalidRegionError, sdk.ParamValidationError)):
        return InvalidLocation("not a location of S3", where=where, found=error)
    if isinstance(error, ResponseParserError):
        # After the first line the SDK repeats the whole answer.
        return not_proven(str(error).partition("\n")[0], where, writes=writes)
    if isinstance(error, (sdk.HTTPClientError, sdk.ConnectionError, sdk.IncompleteReadError)):
        return _no_answer(error, where, writes)
    return StorageError("the S3 client failed", where=where, found=error)


def _no_answer(error: Exception, where: str, writes: bool) -> StoreUnavailable:
    return unanswered(f"{type(error).__name__}: {error}", where, writes=writes)


def _elsewhere(said: str, where: str) -> InvalidLocation:
    return InvalidLocation(
        "the bucket is in another region or at another endpoint",
        where=where,
        found=said,
        hint="Give ?region=NAME or ?endpoint_url=URL, or set AWS_REGION or AWS_ENDPOINT_URL.",
    )
