"""A vLLM that follows a training, if the command `vllm` is there: the one for CPUs will do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

import holdfast
from holdfast.registry.adapters.transformers import model_parts
from holdfast.registry.hub.engines import attest
from tests.registry.hub.engines.lives import free_port

VLLM = shutil.which("vllm")
PROMPT, LENGTH = [1, 2, 3, 4], 12


def ask(url: str, body: Any) -> Any:
    """Have vLLM complete a prompt."""
    data, about = json.dumps(body).encode(), {"content-type": "application/json"}
    with urlopen(Request(f"{url}/v1/completions", data, about), timeout=60) as answer:
        return json.load(answer)


def serving(port: int) -> list[str]:
    """Return the command that serves a model; its last argument is added."""
    words = [str(VLLM), "serve", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    return [*words, "--skip-tokenizer-init", "--max-model-len", "64", "--enforce-eager"]


@contextmanager
def started(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program and end it."""
    space = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with (
        log.open("w") as file,
        subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, **space}) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def wait_for(path: Path) -> Path:
    while not path.exists():
        time.sleep(0.1)
    return path


def confirmed(models: Path) -> str | None:
    """Return the version that the follower says vLLM has."""
    (engine,) = json.loads(wait_for(models / "status.json").read_text())["engines"]
    return engine["confirmed"] and str(engine["confirmed"]["id"])


@pytest.mark.soak  # vLLM takes a minute to start
@pytest.mark.timeout(900)
@pytest.mark.skipif(VLLM is None, reason="needs the command vllm")
def test_vllm_serves_each_version_of_a_training(tmp_path: Path) -> None:
    """It completes a prompt as transformers does with the same weights, and has their bytes."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    served: list[list[int]] = []
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("policy")

        def train(step: int) -> Any:
            """Train towards another sequence in each step."""
            batch = (torch.arange(24)[None] * (2 * step + 1) + step) % 64
            for _ in range(20):
                model(batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return run.save(model_parts(model), step=step)

        saved, models, port = train(1), tmp_path / "models", free_port()
        url, current = f"http://127.0.0.1:{port}", models / "current"
        follow = [sys.executable, "-m", "holdfast.registry.cli", "follow", "policy"]
        follow += ["--registry", str(tmp_path / "reg"), "--into", str(models), "--poll", "1"]
        with (
            started([*follow, "--notify", "vllm", "--url", url], tmp_path / "follow") as follower,
            started([*serving(port), str(wait_for(current))], tmp_path / "vllm") as engine,
        ):
            for step in (1, 2, 3):
                saved = saved if step == 1 else train(step)
                while confirmed(models) != saved.digest.hex():
                    if engine.poll() is not None:
                        pytest.fail((tmp_path / "vllm").read_text()[-3000:])
                    time.sleep(0.1)
                body = {"model": str(current), "prompt": PROMPT, "temperature": 0}
                answer = ask(url, {**body, "max_tokens": LENGTH, "return_token_ids": True})
                served.append(answer["choices"][0]["token_ids"])
                with torch.no_grad():
                    prompt = torch.tensor([PROMPT])
                    made = model.generate(prompt, max_new_tokens=LENGTH, do_sample=False)
                assert served[-1] == made[0, len(PROMPT) :].tolist()
                # On a CPU some tensors are packed; none has other bytes.
                kinds = {*attest(saved, url, None, None).tensors}
                assert "equal" in kinds <= {"equal", "other form"}
                first = attest(reg.checkpoint("policy/main/step1"), url, None, None)
                assert ("changed or other form" in first.tensors) == (step > 1)
            run.status = "completed"
            assert follower.wait(60) == 0
    assert served[0] != served[1] != served[2]
