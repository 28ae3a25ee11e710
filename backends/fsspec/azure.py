"""How adlfs is asked: Azure's own listings and properties, and what its errors mean.

| said | error |
|---|---|
| BlobNotFound, 404 | ObjectNotFound |
| ContainerNotFound, 404, or a name that is none | InvalidLocation |
| InvalidRange, 416 | ObjectTruncated |
| 401, 403, no usable credentials | AccessDenied |
| 429, 5xx, timeouts, broken connections, an error without a code of Azure | StoreUnavailable |
| anything else | StorageError |

Azure cannot begin a listing after a name: earlier names are read and skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    IncompleteReadError,
    ResourceExistsError,
    ServiceRequestError,
    ServiceResponseError,
)

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
from holdfast.backends.s3.proof import NotProven

_UNANSWERED = (ServiceRequestError, ServiceResponseError, IncompleteReadError)
# adlfs closes its client when the process ends; a new instance answers.
_CLOSED = "transport has already been closed"
_HOW_TO_LOG_IN = (
    "Give account_name with account_key, sas_token or credential, or connection_string; or set "
    "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY."
)


class AzureDialect(BucketDialect):
    """adlfs."""

    log_in = _HOW_TO_LOG_IN

    def __init__(self) -> None:
        super().__init__("adlfs", "")

    def options(self, given: Mapping[str, Any], patience: Patience) -> dict[str, Any]:
        """Add our patience for uploads and downloads."""
        usual = {
            "connection_timeout": max(1, int(patience.connect_s)),
            "read_timeout": max(1, int(patience.try_s)),
        }
        return {**usual, **given, "use_listings_cache": False}

    def prepare(self, call: Call) -> None:
        """Check raw answers, and leave repeats to the backend: Azure's own wait for long.

        The client of adlfs has no options for this. A test with lies fails if a version of the
        library has other policies.
        """
        client = call.fs.service_client
        client._config.retry_policy.total_retries = 0
        for policy in client._pipeline._impl_policies:
            if hasattr(policy, "_response_callback"):
                policy._response_callback = _check_raw

    def server(self, fs: Any) -> str:
        """Return the address of the account: containers of two accounts may have one name."""
        return str(fs.service_client.primary_hostname)

    def says_exists(self, error: Exception) -> bool:
        """Return whether the blob exists; adlfs raises the same error for other conflicts."""
        cause = error.__context__
        return isinstance(cause, ResourceExistsError) and _code(cause) == "BlobAlreadyExists"

    def stat(self, call: Call, path: str) -> ObjectInfo:
        """Return size and time; adlfs itself does not name the absent object."""
        found = call.run(_properties, call.fs, path)
        return ObjectInfo(path, found.size, found.last_modified.timestamp())

    def page(self, call: Call, query: Query) -> Page:
        """Return a page of a listing."""
        page: Page = call.run(_page, call.fs, query)
        return page

    @contextmanager
    def translated(self, where: str, *, writes: bool = False) -> Iterator[None]:
        """Turn errors into ours by the error of Azure that adlfs replaced."""
        try:
            yield
        except StorageError:
            raise
        except AzureError as error:
            raise _of_azure(error, where, writes) from error
        except Exception as error:
            cause = error.__cause__ or error.__context__
            unproven = cause if isinstance(cause, NotProven) else error
            if isinstance(unproven, NotProven):
                raise not_proven(str(unproven), where, writes=writes) from error
            if isinstance(cause, AzureError):
                raise _of_azure(cause, where, writes) from error
            if isinstance(error, ValueError) and _CLOSED not in str(error):
                raise InvalidLocation(
                    "not a location of Azure", where=where, found=said(error)
                ) from error
            raise unanswered(said(error), where, writes=writes) from error


def _check_raw(response: Any) -> None:
    answer = response.http_response
    # Azure gives every answer a number.
    if not answer.headers.get("x-ms-request-id"):
        raise NotProven(f"HTTP {answer.status_code}, not from Azure")


async def _properties(fs: Any, path: str) -> Any:
    container, name, _ = fs.split_path(path)
    async with fs.service_client.get_blob_client(container, name) as client:
        return await client.get_blob_properties()


async def _page(fs: Any, query: Query) -> Page:
    objects: list[ObjectInfo] = []
    folders: list[str] = []
    async with fs.service_client.get_container_client(query.bucket) as client:
        asked = {"name_starts_with": query.prefix, "results_per_page": query.size}
        found = (
            client.walk_blobs(**asked, delimiter="/")
            if query.delimiter
            else client.list_blobs(**asked)
        )
        pages = found.by_page(query.token)
        async for page in pages:
            async for entry in page:
                if getattr(entry, "size", None) is None:
                    folders.append(entry.name)
                else:
                    time_s = entry.last_modified.timestamp()
                    objects.append(ObjectInfo(entry.name, entry.size, time_s))
            break
        return Page(objects, folders, pages.continuation_token or None)


def _of_azure(error: AzureError, where: str, writes: bool) -> StorageError:
    if isinstance(error, _UNANSWERED):
        return unanswered(said(error), where, writes=writes)
    if not isinstance(error, HttpResponseError):
        return StorageError("adlfs failed", where=where, found=said(error))
    code, status = _code(error), error.status_code or 0
    if status in (401, 403) or isinstance(error, ClientAuthenticationError):
        return AccessDenied("access is denied", where=where, found=said(error), hint=_HOW_TO_LOG_IN)
    if code == "BlobNotFound" and status == 404:
        return ObjectNotFound("no such object", where=where)
    if code in ("ContainerNotFound", "InvalidResourceName", "ContainerBeingDeleted"):
        return InvalidLocation(
            "no such container", where=where, hint="Create it first, or check the spelling."
        )
    if code == "InvalidRange" or (status == 416 and code):
        return ObjectTruncated("the object ends before the range begins", where=where)
    if status == 429 or status >= 500 or not code:
        return unanswered(said(error), where, writes=writes)
    return StorageError("the store refused the request", where=where, found=said(error))


def _code(error: HttpResponseError) -> str:
    # An answer that Azure did not give has no such code.
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")
