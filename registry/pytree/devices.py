"""Tensors of other devices: when what the program has queued for them is done."""

from __future__ import annotations

import sys

from holdfast.registry.pytree.flatten import FlatState


def await_devices(state: FlatState) -> None:
    """Wait for the caller's own CUDA streams, so that threads copy what the caller sees.

    Copies in the thread pool run on streams of their own, which nothing orders behind the caller's.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    leaves = (leaf.source for part in state.components for leaf in part.leaves)
    for device in {tensor.device for tensor in leaves if getattr(tensor, "is_cuda", False)}:
        torch.cuda.current_stream(device).synchronize()
