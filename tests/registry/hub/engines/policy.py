"""Programs of the test of transformers: `train REGISTRY LOG`, and `serve LOG FOLDER ID`.

`serve` is what a follower starts for each version: it loads the folder, and notes what it computes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import holdfast
from holdfast.registry.adapters.transformers import model_parts

STEPS = 2
_BATCH = torch.arange(24).reshape(2, 12) * 5 % 31


def note(log: str, by: str, version: str, model: Any) -> None:
    """Note the loss of a fixed batch, to the last bit."""
    with torch.no_grad():
        loss = float(model.eval()(_BATCH, labels=_BATCH).loss)
    with Path(log).open("a") as file:
        file.write(json.dumps([by, version, loss.hex()]) + "\n")


def train(registry: str, log: str) -> None:
    """Train for some steps, each of which is served before the next one."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with holdfast.open(registry) as reg, reg.run("policy") as run:
        for step in range(1, STEPS + 1):
            model.train()(_BATCH, labels=_BATCH).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = run.save({**model_parts(model), "optimizer": optimizer}, step=step)
            note(log, "trained", saved.digest.hex(), model)
            while f'"served", "{saved.digest.hex()}"' not in Path(log).read_text():
                time.sleep(0.01)


def serve(log: str, folder: str, version: str) -> None:
    """Load a version and serve it once."""
    note(log, "served", version, AutoModelForCausalLM.from_pretrained(folder))


if __name__ == "__main__":
    {"train": train, "serve": serve}[sys.argv[1]](*sys.argv[2:])
