"""A folder for the Hugging Face Hub: weights as safetensors, configurations, a model card.

It is written from a checkpoint of `holdfast.transformers`, or from a release of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.backends.escape import quoted
from holdfast.registry import formats
from holdfast.registry.curation import Release, write_card
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.loading import Checkpoint, Stored

#: Component with weights -> the name of its file.
WEIGHTS = {"model": "model.safetensors", "adapter": "adapter_model.safetensors"}
#: The component with the configurations, by the names of their files.
CONFIGS = "configs"
#: The component with the metadata of the file with the weights.
METADATA = "metadata"


def export(stored: Stored, folder: str | Path, *, card: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint of `HoldfastCallback` as a folder for `from_pretrained` and for the Hub.

    It holds `model.safetensors` (or a PEFT adapter's `adapter_model.safetensors`), the
    configurations, and a `README.md` that names run, ref, id and metrics. Every byte is verified.

    Args:
        stored: The checkpoint, or a release of one. A release of the weights alone takes the
            configurations of its checkpoint.
        folder: A new or empty folder.
        card: More fields of the card's front matter: `license`, `datasets`, `tags`, ... They win
            over the fields of a release's own card.

    Returns:
        The folder.

    Raises:
        InvalidInput: The folder is not empty, or the card cannot be written.
        IncompatibleState: The checkpoint holds no weights or no configuration.
        IntegrityError: It is damaged.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput("the path exists", where=folder, expected="a new or empty folder")
    text = _card(stored, card or {})
    write_model(stored, folder)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder


def is_model(stored: Stored) -> bool:
    """Return whether a stored state, with its checkpoint, has the parts that `export` writes."""
    return configured(stored) is not None and any(name in stored.components for name in WEIGHTS)


def write_model(stored: Stored, folder: Path) -> None:
    """Write weights and configurations; replace files of the same names."""
    parts, source = stored.components, configured(stored)
    weights, *others = [name for name in WEIGHTS if name in parts] or [""]
    if not weights or others or source is None:
        raise IncompatibleState(
            "no model of transformers: weights or configuration are missing",
            where=stored.ref,
            expected=f"the components {CONFIGS} and one of {', '.join(WEIGHTS)}",
            found=", ".join(parts),
            hint="Publish a release of the weights, `configs` and `metadata`.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    only = [weights, *({METADATA} & parts.keys())]
    about = None if METADATA in parts else {"format": "pt"}
    formats.write(folder / WEIGHTS[weights], stored, about, only=only, force=True)
    for name, data in config_files(source).items():
        (folder / name).write_bytes(data)


def config_files(stored: Stored) -> dict[str, bytes]:
    """Return the files of the configurations of a checkpoint of `HoldfastCallback`, by name."""
    found, configs = {}, stored.handle.load(CONFIGS, portable=True)[CONFIGS]
    for name, config in configs.items() if isinstance(configs, dict) else [(configs, None)]:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".json"):
            what, said = "not the name of a configuration", quoted(name)[:100]
            raise IncompatibleState(what, where=stored.ref, found=said)
        try:
            found[name] = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            where = f"{stored.ref}: {CONFIGS}/{name}"
            raise IncompatibleState("a value is not JSON", where=where, found=error) from error
    return found


def configured(stored: Stored) -> Stored | None:
    """Return the state with the configurations; for a release of the weights, its checkpoint."""
    if CONFIGS in stored.components:
        return stored
    source = stored.source_checkpoint() if isinstance(stored, Release) else None
    return source if source is not None and CONFIGS in source.components else None


def _card(stored: Stored, card: Mapping[str, Any]) -> str:
    """Return a model card with the metrics known now."""
    own = stored.card if isinstance(stored, Release) else {}
    rows: dict[str, object] = {"checkpoint": stored.ref, "id": str(stored.digest)}
    if isinstance(stored, Checkpoint):
        rows |= {"step": stored.step, **stored.metrics}
    elif isinstance(stored, Release):
        rows |= {"version": stored.version, "trained as": stored.source, **stored.metrics}
    return card_text(stored, {**own, **card}, rows)


def card_text(stored: Stored, card: Mapping[str, Any], rows: Mapping[str, object]) -> str:
    """Return a model card as Markdown: fields as its front matter, and a table."""
    library = "peft" if "adapter" in stored.components else "transformers"
    front = write_card({"library_name": library, **card})
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"---\n{front}---\n\n# {stored.run_id}\n\n| | |\n|---|---|\n{table}"
