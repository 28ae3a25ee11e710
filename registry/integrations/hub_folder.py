"""A folder as the Hugging Face Hub has it: weights as safetensors, configurations, a model card.

A model of transformers is taken apart into the components of a checkpoint, and written from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.names.cards import write_card

#: Component with weights -> the name of its file.
WEIGHTS = {"model": "model.safetensors", "adapter": "adapter_model.safetensors"}
#: The component with the configurations, by the names of their files.
CONFIGS = "configs"
#: The component with the metadata of the file with the weights.
METADATA = "metadata"


def export(
    checkpoint: Checkpoint, folder: str | Path, *, card: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint of `HoldfastCallback` as a folder for `from_pretrained` and for the Hub.

    It holds `model.safetensors` (or a PEFT adapter's `adapter_model.safetensors`), the
    configurations, and a `README.md` that names run, ref, id and metrics. Every byte is verified.

    Args:
        checkpoint: The checkpoint.
        folder: A new or empty folder.
        card: More fields of the card's front matter: `license`, `datasets`, `tags`, ...

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
    text = _card(checkpoint, card or {})
    write_model(checkpoint, folder)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder


def model_parts(model: Any) -> dict[str, Any]:
    """Return the components of a model: weights, configurations, and metadata of their file.

    Raises:
        InvalidInput: Several adapters of PEFT are active.
    """
    parts = {METADATA: {"format": "pt"}}
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict  # only a PEFT model needs it

        name, *others = model.active_adapters
        if others:
            raise InvalidInput("several adapters are active", found=", ".join([name, *others]))
        config = model.peft_config[name].to_dict()
        files = {"adapter_config.json": {**config, "inference_mode": True}}
        weights = {"adapter": dict(get_peft_model_state_dict(model, adapter_name=name))}
    else:
        kinds = {"config.json": "config", "generation_config.json": "generation_config"}
        found = {file: getattr(model, kind, None) for file, kind in kinds.items()}
        files = {file: one.to_dict() for file, one in found.items() if one is not None}
        weights = {"model": model.state_dict()}
    plain = json.loads(json.dumps(files, default=_plain, sort_keys=True))
    return {**weights, **parts, CONFIGS: plain}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def write_model(checkpoint: Checkpoint, folder: Path) -> None:
    """Write weights and configurations; replace files of the same names."""
    parts = checkpoint.components
    weights, *others = [name for name in WEIGHTS if name in parts] or [""]
    if not weights or others or CONFIGS not in parts:
        raise IncompatibleState(
            "no model of transformers: weights or configuration are missing",
            where=checkpoint.ref,
            expected=f"the components {CONFIGS} and one of {', '.join(WEIGHTS)}",
            found=", ".join(parts),
        )
    folder.mkdir(parents=True, exist_ok=True)
    only = [weights, *({METADATA} & parts.keys())]
    formats.write(folder / WEIGHTS[weights], checkpoint, only=only, force=True)
    for name, config in checkpoint.load(only=CONFIGS)[CONFIGS].items():
        if Path(name).name != name or not name.endswith(".json"):
            raise IncompatibleState(
                "not the name of a configuration", where=checkpoint.ref, found=name
            )
        (folder / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _card(checkpoint: Checkpoint, card: Mapping[str, Any]) -> str:
    """Return a model card; the metrics are those that are known now."""
    library = "peft" if "adapter" in checkpoint.components else "transformers"
    front = write_card({"library_name": library, **card})
    rows = {
        "checkpoint": checkpoint.ref,
        "id": str(checkpoint.digest),
        "step": checkpoint.step,
        **checkpoint.metrics,
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"---\n{front}---\n\n# {checkpoint.run_id}\n\n| | |\n|---|---|\n{table}"
