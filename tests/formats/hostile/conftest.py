from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.registry import formats
from holdfast.registry.errors import RegistryError
from tests.formats.hostile.refusing import Refuse


@pytest.fixture
def refuse(tmp_path: Path) -> Iterator[Refuse]:
    """Check that pushing a file fails with a typed error, and changes nothing in the registry."""
    with holdfast.init(tmp_path / "registry", skip_race_probe=True) as opened:
        run = opened.create_run("run")

        def files() -> dict[Path, bytes]:
            held = (tmp_path / "registry").rglob("*")
            return {path: path.read_bytes() for path in held if path.is_file()}

        before = files()

        def refuse(path: Path, message: str) -> RegistryError:
            with pytest.raises(RegistryError, match=message) as caught:
                run.save(formats.read(path).state, step=1)
            assert caught.value.exit_code == 3
            assert files() == before
            return caught.value

        yield refuse
