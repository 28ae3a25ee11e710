"""Holdfast inside other programs: Lightning, the HF Trainer, Weights & Biases, IPython.

Each module wraps one of them, and only these modules import those packages. `saving` is the part
that trainers share, `sharded` that for models of which each rank has a part; `hub_parts` takes
models of transformers and PEFT apart. Users import them as
`holdfast.lightning`, `holdfast.transformers`, `holdfast.wandb` and `holdfast.ipython`. Nothing else
is built on this room.
"""
