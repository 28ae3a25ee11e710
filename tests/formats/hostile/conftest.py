from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import registry
from registry import formats
from registry.errors import RegistryError

Refuse = Callable[[Path, str], RegistryError]


@pytest.fixture
def refuse(tmp_path: Path) -> Iterator[Refuse]:
    """Check that pushing a file fails with a typed error, and changes nothing in the registry."""
    with registry.init(tmp_path / "registry", skip_race_probe=True) as opened:
        run = opened.create_run("run")
        before = _files(tmp_path / "registry")

        def refuse(path: Path, message: str) -> RegistryError:
            with pytest.raises(RegistryError, match=message) as caught:
                run.save(formats.read(path).state, step=1)
            assert caught.value.exit_code == 3
            assert _files(tmp_path / "registry") == before
            return caught.value

        yield refuse


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
