"""Holdfast inside other training programs: Lightning, the HF Trainer, Weights & Biases.

Each module wraps one of them, and only these modules import those packages. `saving` is the part
that they share; `hub_folder` takes models of transformers and PEFT apart, and writes them as files.
Users import them as `holdfast.lightning`, `holdfast.transformers` and `holdfast.wandb`. Nothing
else is built on this room.
"""
