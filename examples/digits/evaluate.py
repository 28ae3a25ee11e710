"""Score a checkpoint on data that training never saw, and report the score into the registry.

Runs anywhere that can reach the registry, beside the training or long after it; it needs no more
than the checkpoint's model, so it fetches no more.

    python evaluate.py --registry FOLDER_OR_BUCKET RUN/best
"""

from __future__ import annotations

import argparse
import json
import os

from task import Net, load_data, make_deterministic, score

import holdfast


def evaluate(reg: holdfast.Registry, ref: str) -> dict[str, object]:
    """Score one checkpoint and report it."""
    ck = reg.checkpoint(ref)
    model = Net()
    ck.load_into(model, component="model")
    found = {f"test_{name}": value for name, value in score(model, load_data().test).items()}
    ck.report(found)
    return {"ref": ck.ref, "id": str(ck.digest), "step": ck.step, "score": found}


def main() -> None:
    """Read the command line, evaluate, print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ref", help="for example RUN/best")
    parser.add_argument("--registry", default=os.environ.get("HOLDFAST_REGISTRY"))
    chosen = parser.parse_args()
    if chosen.registry is None:
        parser.error("name a registry by --registry or HOLDFAST_REGISTRY")
    make_deterministic()
    with holdfast.open(chosen.registry) as reg:
        print(json.dumps(evaluate(reg, chosen.ref)))


if __name__ == "__main__":
    main()
