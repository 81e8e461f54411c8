"""An engine with a GGUF file gives the tokens of transformers with the converted checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.bench.runner import GenerationJob, Runner
from cluster.convert import engine_config, fetch_weights, with_tokenizer
from secateur.config import EngineArgs
from tests.support import checkpoints
from tests.support.gguf_files import write_gguf


@pytest.mark.parametrize("speculation", [None, {"method": "ngram"}])
def test_greedy_tokens_equal_transformers(
    speculation: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = checkpoints.write_model(tmp_path / "model", "llama", vocab_size=512)
    file = write_gguf(tmp_path / "model.gguf", model, "llama", kind="Q8_0")
    args = EngineArgs.load({"model": str(file), "device": "cpu", "speculative_config": speculation, "num_pages": 40})
    config, tokenizer = with_tokenizer(args, engine_config(args))
    fetch_weights(args, config)
    assert Path(config.model_path).is_relative_to(tmp_path / "cache" / "secateur" / "gguf")
    prompts = [tokenizer.encode(text) for text in ("ab ab ab ab", "xyz", "1212 12")]
    reference = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=torch.float32)
    with Runner(config) as runner:
        answers = runner.run([GenerationJob(prompt=prompt, max_tokens=24) for prompt in prompts], concurrency=3)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer.tokens == expected[0, len(prompt) :].tolist()
