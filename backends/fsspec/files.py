"""Plain files on any file system of fsspec, for programs that know nothing of a registry.

They are written as streams, each whole or not at all. Nothing here decides which writer wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.backends.errors import (
    AccessDenied,
    ObjectNotFound,
    RegistryError,
    StorageError,
    StoreUnavailable,
)
from holdfast.backends.location import redact
from holdfast.backends.secrets import Secrets

_PART_BYTES = 8 * 2**20


class Files:
    """The files below a URL.

    Args:
        fs: The file system.
        url: The URL of the folder, or of the bucket and prefix.
        options: The options of the file system, which no message repeats.
    """

    def __init__(self, fs: Any, url: str, options: object) -> None:
        self._fs, self._root = fs, str(fs._strip_protocol(url)).rstrip("/")
        self.url = redact(url).rstrip("/")  # without secrets
        self._secrets = Secrets([options])

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of the files below a folder, by their path in it."""
        root = f"{self._root}/{folder}/"
        with self._reported(folder):
            self._fs.invalidate_cache()
            found = self._fs.find(root, detail=True)
        return {path.partition(root)[2]: one["size"] for path, one in found.items()}

    def write(self, path: str, parts: Iterable[bytes]) -> None:
        """Write a file; one of this name is replaced. It is there once it is whole.

        Raises:
            StorageError: The file could not be written.
        """
        with self._reported(path):
            target = f"{self._root}/{path}"
            if "file" in self._fs.protocol:
                self._fs.makedirs(self._fs._parent(target), exist_ok=True)
            file = self._fs.open(target, "wb", autocommit=False)
            try:
                for part in parts:
                    file.write(part)
                file.close()
                file.commit()
            except BaseException:
                file.discard()
                raise

    def read(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of a file in parts.

        Raises:
            ObjectNotFound: There is none.
            StorageError: The file could not be read.
        """
        with self._reported(path), self._fs.open(f"{self._root}/{path}", "rb") as file:
            while part := file.read(_PART_BYTES):
                yield part

    @contextmanager
    def _reported(self, path: str) -> Iterator[None]:
        where = f"{self.url}/{path}"
        try:
            yield
        except RegistryError:
            raise
        except FileNotFoundError as error:
            raise ObjectNotFound("no such file or bucket", where=where) from error
        except PermissionError:
            raise AccessDenied("access was refused", where=where) from None
        except Exception as error:  # drivers have classes of their own
            said = self._secrets.hide(f"{type(error).__name__}: {error}")
            kind = (
                StoreUnavailable
                if isinstance(error, (ConnectionError, TimeoutError))
                else StorageError
            )
            raise kind("the store refused a request", where=where, found=said) from None
