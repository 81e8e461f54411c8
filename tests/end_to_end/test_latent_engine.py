"""A DeepSeek-V3 in a whole engine: every draft method leaves the tokens as they are, and its pages are shared."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.text.tokenizer import Tokenizer
from tests.end_to_end.test_hybrid_engine import METHODS, V, answers, config_of, engine, submits
from tests.support import checkpoints
from tests.support.engine_here import EngineHere
from tests.support.engines import BUNDLED, GenerationJob, Runner
from tests.workers.models.test_latent import GLM, YARN
from workers.comm.ipc import Submit
from workers.sampling.grammar import grammar_text
from workers.settings import Constraints, SamplingSettings

torch.set_num_threads(1)

SCALED = {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("latent")
    own = checkpoints.LATENT["deepseek_v3"] | SCALED
    checkpoints.add_mtp(checkpoints.write_model(root / "target", "deepseek_v3", vocab_size=V, **own), "deepseek_v3")
    checkpoints.write_model(root / "draft", "youtu", vocab_size=V, num_hidden_layers=1, **checkpoints.LATENT["youtu"])
    return root


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[float, dict[int, list[int]]]:
    """Return the tokens without speculation, by temperature."""
    with engine(folder, "off") as here:
        return {temperature: answers(here, submits(temperature)) for temperature in (0.0, 1.0)}


def test_greedy_tokens_are_those_of_transformers(folder: Path, expected: dict[float, dict[int, list[int]]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, attn_implementation="eager")
    for submit in submits(0.0):
        if submit.sampling.constraints.is_empty:
            told = expected[0.0][submit.id]
            with torch.no_grad():
                logits = model(torch.tensor([[*submit.prompt, *told[:-1]]])).logits[0, len(submit.prompt) - 1 :]
            assert logits.argmax(-1).tolist() == told


@pytest.mark.parametrize("method", [name for name in METHODS if name != "off"])
def test_tokens_equal_those_without_speculation(
    folder: Path, expected: dict[float, dict[int, list[int]]], method: str
) -> None:
    with engine(folder, method) as here:
        for temperature, told in expected.items():
            assert answers(here, submits(temperature)) == told
        assert here.engine._stats.num_accepted_tokens > 20
        assert here.engine._stats.prefix_cache_hits > 100, "the second time"


def test_prefixes_of_any_length_are_found_and_leave_the_tokens_as_they_are(folder: Path) -> None:
    rng = random.Random(11)
    text = [rng.randrange(V) for _ in range(150)]

    def asked(length: int) -> list[Submit]:
        own = SamplingSettings(temperature=1.0, seed=length)
        return [Submit(id=0, prompt=text[:length], max_tokens=10, sampling=own, ignore_eos=True)]

    lengths = [1, 15, 16, 17, 33, 64, 100, 128, 149]
    with engine(folder, "off", enable_prefix_caching=False) as here:
        told = {length: answers(here, asked(length)) for length in lengths}
    with engine(folder, "mtp") as here:
        answers(here, asked(150))
        for length in lengths:
            before = here.engine._stats.prefix_cache_hits
            assert answers(here, asked(length)) == told[length]
            assert here.engine._stats.prefix_cache_hits - before == (length - 1) // 16 * 16


def test_preemptions_and_aborts_change_nothing(folder: Path, expected: dict[float, dict[int, list[int]]]) -> None:
    rng = random.Random(6)
    with engine(folder, "mtp") as here:

        def disturb(here: EngineHere, step: int) -> None:
            running = here.engine._running
            if running and rng.random() < 0.4:
                here.engine.preempt(rng.choice(running))

        here.submit(Submit(id=100, prompt=[1, 2] * 20, max_tokens=50, ignore_eos=True))
        here.step()
        here.engine._abort(100)
        assert answers(here, submits(1.0), disturb) == expected[1.0]
        assert here.engine._stats.num_preemptions > 5


def test_two_ranks_give_the_same_tokens(folder: Path, expected: dict[float, dict[int, list[int]]]) -> None:
    jobs = [
        GenerationJob(prompt=one.prompt, max_tokens=one.max_tokens, sampling=one.sampling)
        for temperature in (0.0, 1.0)
        for one in submits(temperature)
    ]
    with Runner(config_of(folder, "mtp", tensor_parallel_size=2, step_timeout_s=120.0)) as runner:
        told = runner.run(jobs, concurrency=4)
        assert runner.stats.num_accepted_tokens > 20
    wanted = [tokens for by_id in expected.values() for tokens in by_id.values()]
    assert [one.tokens for one in told] == wanted


def test_a_grammar_is_followed_with_and_without_drafts(folder: Path, tmp_path: Path) -> None:
    pattern = r"[A-Z][a-z]{2,9}( [0-9]{1,4}){0,2}"
    own = checkpoints.LATENT["deepseek_v3"] | {"vocab_size": 2048, "eos_token_id": [0, 2]}
    path = checkpoints.add_mtp(checkpoints.write_model(tmp_path / "target", "deepseek_v3", **own), "deepseek_v3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / "target" / name, path)
    constraints = Constraints(grammar=grammar_text("regex", pattern, whitespace="none"))
    asked = [
        Submit(
            id=i,
            prompt=[5, 6, 7 + i],
            max_tokens=30,
            sampling=SamplingSettings(temperature=1.0, seed=i, constraints=constraints),
        )
        for i in range(4)
    ]
    told = []
    for method in ("off", "mtp"):
        with engine(tmp_path, method, eos_token_ids=(0, 2)) as here:
            told.append(answers(here, asked))
    assert told[0] == told[1]
    texts = [Tokenizer(str(path)).decode(tokens[:-1]) for tokens in told[0].values()]
    assert all(re.fullmatch(pattern, text) for text in texts)


def test_a_glm_in_transformers_class_drafts_with_its_own_layer(tmp_path: Path) -> None:
    checkpoints.add_mtp(checkpoints.write_model(tmp_path / "target", "glm4_moe", vocab_size=V, **GLM), "deepseek_v3")
    told = []
    for method in ("off", "mtp"):
        with engine(tmp_path, method) as here:
            told.append(answers(here, submits(1.0, 4)))
    assert told[0] == told[1] and here.engine._stats.num_accepted_tokens > 5
