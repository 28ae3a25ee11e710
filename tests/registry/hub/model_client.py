"""A program of a user who has never heard of Holdfast. First it makes the runs that it then reads.

`HF_ENDPOINT` is set. It prints `ready` when the registry is there, reads one line when it is
served, and prints `done`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

import holdfast
from holdfast.registry.adapters.transformers import model_parts

ROOT = Path(sys.argv[1])


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def tokenizer() -> Any:
    words = models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def read(path: Path, **options: Any) -> Any:
    return holdfast.formats.read(path, **options).state


def make() -> None:
    for seed in (1, 2):
        model(seed).save_pretrained(ROOT / f"m{seed}")
        tokenizer().save_pretrained(ROOT / f"m{seed}")
    tokenizer().save_pretrained(ROOT / "tokenizer")
    adapted = get_peft_model(model(1), LoraConfig(target_modules=["q_proj"], r=2))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            weight += "lora_B" in name
    adapted.peft_config["default"].base_model_name_or_path = "base"
    adapted.save_pretrained(ROOT / "adapter")
    with holdfast.init(ROOT / "reg", skip_race_probe=True) as reg:
        with reg.create_run("base", project="lab") as run:
            run.save(read(ROOT / "m1", format="hf"), step=1)
            run.save(read(ROOT / "m2", format="hf"), step=2)
        with reg.create_run("trained") as run:
            found = run.save({**model_parts(model(1)), "optimizer": {"lr": 0.1}}, step=1)
            run.releases.publish("1.0.0", found, only=["model"])
            run.pins.artifacts.set("tokenizer", read(ROOT / "tokenizer", format="tree"))
        with reg.create_run("tuned") as run:
            run.save(read(ROOT / "adapter", format="hf"), step=1)


def same(one: Any, other: Any) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def check_models() -> None:
    first, second = model(1), model(2)
    assert same(AutoModelForCausalLM.from_pretrained("base", revision="main/step1"), first)
    assert same(AutoModelForCausalLM.from_pretrained("base"), second)
    assert same(AutoModelForCausalLM.from_pretrained("trained", revision="releases/1.0.0"), first)
    for name in ("base", "trained"):
        assert AutoTokenizer.from_pretrained(name)("a b c").input_ids == [1, 2, 3]
    assert pipeline("text-generation", model="lab/base")("a b", max_new_tokens=3)
    base = AutoModelForCausalLM.from_pretrained("base", revision="main/step1")
    ids = torch.tensor([[1, 2, 3]])
    plain = base(ids).logits
    tuned = PeftModel.from_pretrained(base, "tuned")
    expected = PeftModel.from_pretrained(model(1), ROOT / "adapter")
    assert torch.equal(tuned(ids).logits, expected(ids).logits)
    assert not torch.equal(tuned(ids).logits, plain)


if __name__ == "__main__":
    make()
    print("ready", flush=True)
    sys.stdin.readline()
    check_models()
    print("done")
