"""A hybrid and a model with latents in a whole engine: no draft method and no fate of a request changes its tokens.

The vocabulary is so small that trees of a random drafter are often right by chance.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.engine.local_engine import LocalEngine
from cluster.text.tokenizer import Tokenizer
from drafter.proposers.base import DraftModelProposer, FeatureProposer, Proposer, shared_vocabulary
from drafter.proposers.eagle import FcHead
from drafter.proposers.ngram import MatchLengths, NgramProposer
from tests.end_to_end.test_engine_laws import p_value
from tests.support import checkpoints
from tests.support.engine_here import EngineHere, Pair, engine_here
from tests.support.engines import BUNDLED, GenerationJob, Runner
from tests.support.oracles import product_law
from tests.workers.models.test_latent import CONFIG, GLM
from verifier import prefix_cache
from verifier.adaptive.cost_model import UNPROFILED
from workers.comm.ipc import RequestStats, Resumption, Speculation, Submit
from workers.config import DraftConfig, EngineConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.models.fc_head_format import read_mtp_spec
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.sampling.grammar import grammar_text
from workers.settings import Constraints, SamplingSettings

torch.set_num_threads(1)

V, PAGES = 16, 200
TREE = TreeConfig(num_speculative_tokens=12, max_depth=4, max_children=4)
CHAIN = TreeConfig(kind="chain", num_speculative_tokens=3)
COSTS = SimulatedCosts(step_ms=1.0, row_ms=0.001, draft_ms=0.05, level_ms=0.05)
AUTO = replace(TREE, prune=PruneConfig(auto=True, simulated_costs=COSTS))
METHODS = {
    "off": (None, TREE),
    "ngram": ("ngram", TREE),
    "draft_model": ("draft_model", TREE),
    "mtp": ("mtp", TREE),
    "mtp, chain": ("mtp", CHAIN),
    "mtp, auto": ("mtp", AUTO),
}


def write_hybrid(path: Path, **options: object) -> Path:
    return checkpoints.add_mtp(checkpoints.write_hybrid(path, **options), "qwen3_5")  # type: ignore[arg-type]


def write_latent(path: Path, **options: object) -> Path:
    return checkpoints.add_mtp(checkpoints.write_model(path, "deepseek_v3", **CONFIG | options), "deepseek_v3")


FAMILIES = {"hybrid": write_hybrid, "latent": write_latent}
DRAFTS = {"hybrid": ("llama", {}), "latent": ("youtu", checkpoints.LATENT["youtu"])}
CACHED = {"hybrid": 0.4, "latent": 0.7}
"""The part of tokens that prefixes share, at least: a hybrid only resumes where a state was kept."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(family)
    FAMILIES[family](root / "target", vocab_size=V)
    kind, config = DRAFTS[family]
    checkpoints.write_model(root / "draft", kind, vocab_size=V, num_hidden_layers=1, **config)
    return root


@cache
def pair(folder: Path) -> Pair:
    target = folder / "target"
    spec = read_spec(target)
    head = FcHead.load(read_mtp_spec(target, spec), target, target)
    return Pair(load_decoder(target, spec), lambda states: states, head)


def config_of(folder: Path, method: str, **options: object) -> EngineConfig:
    name, tree = METHODS[method]
    draft = None
    if name is not None:
        path = {"ngram": "", "draft_model": str(folder / "draft"), "mtp": str(folder / "target")}[name]
        draft = DraftConfig(method=name, model_path=path, tree=tree, prompt_lookup_min=1, prompt_lookup_max=3)  # type: ignore[arg-type]
    settings = {"max_model_len": 256, "max_num_seqs": 3, "max_num_batched_tokens": 48, "num_pages": PAGES}
    return EngineConfig(model_path=str(folder / "target"), draft=draft, **settings | options)  # type: ignore[arg-type]


@contextmanager
def engine(folder: Path, method: str, **options: object) -> Iterator[EngineHere]:
    def proposer(head: object, kv: object, page_size: int, tree_rows: int) -> Proposer:
        match METHODS[method][0]:
            case "ngram":
                return NgramProposer(MatchLengths(1, 3), V, PAGES, page_size)
            case "draft_model":
                model = load_decoder(folder / "draft", read_spec(folder / "draft"))
                kv = model.new_kv_pool(PAGES * page_size)
                return DraftModelProposer(model, shared_vocabulary(model, V), kv, page_size)
            case _:
                return FeatureProposer(head, kv, page_size, tree_rows)  # type: ignore[arg-type]

    config = config_of(folder, method, **options)
    with engine_here(config, pair(folder), UNPROFILED, proposer=proposer) as here:
        yield here


def answers(
    here: EngineHere, submits: list[Submit], disturb: Callable[[EngineHere, int], None] = lambda here, step: None
) -> dict[int, list[int]]:
    """Return the tokens of each request; disturb(here, k) is called before step k."""
    told: dict[int, list[int]] = {submit.id: [] for submit in submits}
    for submit in submits:
        here.submit(submit)
    for step in range(2000):
        for chunk in here.step():
            assert chunk.error is None
            told[chunk.id] += chunk.tokens
        if not (here.engine._running or here.engine._waiting):
            assert not here.engine._folds and len(here.engine._free_seats) == here.engine._limits.max_num_seqs
            return told
        disturb(here, step)
    raise AssertionError("requests that never finish")


def submits(temperature: float, count: int = 7) -> list[Submit]:
    """Return requests with prompts of one token and of several chunks, one under penalties."""
    rng = random.Random(5)
    penalties = Constraints(frequency_penalty=0.5, bad_words=[[3, 4]])
    return [
        Submit(
            id=i,
            prompt=[rng.randrange(V) for _ in range((1, 40, 130, 2, 65, 17, 3)[i])],
            max_tokens=18,
            sampling=SamplingSettings(
                temperature=temperature, seed=i, constraints=penalties if i == 3 else Constraints()
            ),
            ignore_eos=True,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[float, dict[int, list[int]]]:
    """Return the tokens without speculation, by temperature."""
    with engine(folder, "off") as here:
        return {temperature: answers(here, submits(temperature)) for temperature in (0.0, 1.0)}


def test_greedy_tokens_are_those_of_transformers(folder: Path, expected: dict[float, dict[int, list[int]]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, attn_implementation="eager")
    for submit in submits(0.0):
        text = submit.prompt + expected[0.0][submit.id]
        with torch.no_grad():
            logits = model(torch.tensor([text[:-1]])).logits[0, len(submit.prompt) - 1 :]
        best = logits.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > 1e-2
        if submit.sampling.constraints.is_empty:
            told = torch.tensor(expected[0.0][submit.id])
            assert is_clear.sum() > 12 and torch.equal(logits.argmax(-1)[is_clear], told[is_clear])


@pytest.mark.parametrize("method", [name for name in METHODS if name != "off"])
def test_tokens_equal_those_without_speculation(
    folder: Path, expected: dict[float, dict[int, list[int]]], method: str
) -> None:
    """Seats are reused, and prompt chunks run beside trees and bare roots."""
    with engine(folder, method) as here:
        for temperature, told in expected.items():
            assert answers(here, submits(temperature)) == told
        assert here.engine._stats.num_accepted_tokens > 20


@pytest.mark.parametrize("method", ["off", "mtp"])
def test_prefix_hits_of_every_length_change_no_token(
    folder: Path, family: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "CHECKPOINT_INTERVAL", 32)
    rng = random.Random(7)
    text = [rng.randrange(V) for _ in range(110)]
    asked = [
        Submit(
            id=length,
            prompt=[*text[:length], length % V],
            max_tokens=7,
            sampling=SamplingSettings(temperature=float(length % 2), seed=length),
            ignore_eos=True,
        )
        for length in rng.sample(range(len(text)), 60)
    ]
    with engine(folder, method, enable_prefix_caching=False) as here:
        wanted = answers(here, asked)
        assert here.engine._stats.prefix_cache_queries == 0
    with engine(folder, method) as here:
        found = [answers(here, asked[begin : begin + 3]) for begin in range(0, len(asked), 3)]
        stats = here.engine._stats
        assert {id: tokens for some in found for id, tokens in some.items()} == wanted
        assert stats.prefix_cache_hits > CACHED[family] * stats.prefix_cache_queries


@pytest.mark.parametrize("model", ["qwen3_next", "glm4_moe"])
def test_other_models_draft_with_their_own_layer(tmp_path: Path, model: str) -> None:
    """A hybrid with experts; and a GLM-4.5, which has the layer of a DeepSeek-V3 and runs in transformers' class."""
    if model == "qwen3_next":
        write_hybrid(tmp_path / "target", family=model, vocab_size=V, **checkpoints.HYBRID_MOE)
    else:
        target = checkpoints.write_model(tmp_path / "target", model, vocab_size=V, **GLM)
        checkpoints.add_mtp(target, "deepseek_v3")
    told = []
    for method in ("off", "mtp"):
        with engine(tmp_path, method) as here:
            told.append(answers(here, submits(1.0, 4)))
    assert told[0] == told[1] and here.engine._stats.num_accepted_tokens > 5


@pytest.mark.parametrize("method", ["mtp", "mtp, chain"])
def test_a_grammar_is_followed_with_and_without_drafts(family: str, tmp_path: Path, method: str) -> None:
    pattern = r"[A-Z][a-z]{2,9}( [0-9]{1,4}){0,2}"
    path = FAMILIES[family](tmp_path / "target", vocab_size=2048, eos_token_id=[0, 2])
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
    for name in ("off", method):
        with engine(tmp_path, name, eos_token_ids=(0, 2)) as here:
            told.append(answers(here, asked))
    assert told[0] == told[1]
    texts = [Tokenizer(str(path)).decode(tokens[:-1]) for tokens in told[0].values()]
    assert all(re.fullmatch(pattern, text) for text in texts)


def test_preemptions_and_aborts_between_a_step_and_its_fold_change_nothing(
    folder: Path, expected: dict[float, dict[int, list[int]]]
) -> None:
    rng, told = random.Random(6), {submit.id: list[int]() for submit in submits(1.0)}
    with engine(folder, "mtp") as here:
        running, waiting = here.engine._running, here.engine._waiting
        for submit in submits(1.0):
            here.submit(submit)
        for step in range(500):
            for chunk in here.step():
                told[chunk.id] = told.get(chunk.id, []) + chunk.tokens
            if not any(request.id < 100 for request in (*running, *waiting)):
                break
            if running and rng.random() < 0.4:
                here.engine.preempt(rng.choice(running))
            if rng.random() < 0.2:  # these take a seat, and never finish
                here.submit(Submit(id=100 + step, prompt=[1, 2], max_tokens=50, ignore_eos=True, priority=-1))
            for request in [request for request in running if request.id >= 100 and rng.random() < 0.3]:
                here.engine._abort(request.id)
        assert {id: told[id] for id in expected[1.0]} == expected[1.0]
        assert here.engine._stats.num_preemptions > 5 and len(told) > len(expected[1.0])


@pytest.mark.parametrize("method", ["off", "mtp", "ngram"])
def test_a_request_of_a_lost_engine_goes_on_with_the_same_tokens(
    folder: Path, expected: dict[float, dict[int, list[int]]], method: str
) -> None:
    """Another engine is told what was sent."""
    told, begun = expected[1.0], submits(1.0)
    with engine(folder, method) as here:
        for count in (1, 2, 5, 9, 17):
            rest = [
                replace(
                    submit,
                    resumption=Resumption(output=told[submit.id][:count], num_prompt_logprobs=0, stats=RequestStats()),
                )
                for submit in begun
            ]
            assert answers(here, rest) == {id: tokens[count:] for id, tokens in told.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_rank_changes_no_token(folder: Path, size: int) -> None:
    """The last rank of the target is killed while it answers, and another engine goes on."""

    async def main() -> None:
        engine = LocalEngine(config_of(folder, "mtp", tensor_parallel_size=size, step_timeout_s=120.0), restarts=True)
        async with engine as client:

            async def answer(seed: int) -> list[int]:
                submit = Submit(
                    id=client.new_id(),
                    prompt=[3, 1, 4] * 9,
                    max_tokens=200,
                    sampling=SamplingSettings(seed=seed),
                    ignore_eos=True,
                )
                return [token async for chunk in client.submit(submit) for token in chunk.tokens]

            async def both() -> list[list[int]]:
                return list(await asyncio.gather(answer(1), answer(2)))

            wanted = await both()
            waiting = asyncio.create_task(both())
            while client.stats.num_running < 2:
                await asyncio.sleep(0.01)
            os.kill(engine.pids[size - 1], signal.SIGKILL)
            assert await asyncio.wait_for(waiting, 240) == wanted

    asyncio.run(main())


@pytest.mark.parametrize("method", ["mtp", "mtp, chain"])
def test_two_ranks_give_the_same_tokens(folder: Path, expected: dict[float, dict[int, list[int]]], method: str) -> None:
    jobs = [
        GenerationJob(prompt=one.prompt, max_tokens=one.max_tokens, sampling=one.sampling)
        for temperature in (0.0, 1.0)
        for one in submits(temperature)
    ]
    with Runner(config_of(folder, method, tensor_parallel_size=2, step_timeout_s=120.0)) as runner:
        told = runner.run(jobs, concurrency=4)
        assert runner.stats.num_accepted_tokens > 20
    wanted = [tokens for by_id in expected.values() for tokens in by_id.values()]
    assert [one.tokens for one in told] == wanted


def test_texts_of_sampled_drafts_follow_the_law_of_the_target(folder: Path) -> None:
    """The joint distribution of the first two tokens of many seeds is the product of transformers' conditionals."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, attn_implementation="eager")
    prompt = [3, 1, 4, 1, 5]

    @torch.no_grad()
    def p(output: tuple[int, ...]) -> np.ndarray:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].double() / 0.7
        return logits.softmax(-1).numpy()

    told: list[tuple[int, ...]] = []
    with engine(folder, "mtp", max_num_seqs=64, max_num_batched_tokens=512) as here:
        for begin in range(0, 600, 100):
            asked = [
                Submit(
                    id=seed,
                    prompt=prompt,
                    max_tokens=5,
                    sampling=SamplingSettings(temperature=0.7, seed=seed),
                    ignore_eos=True,
                    speculation=Speculation(acceptance="rejection"),
                )
                for seed in range(begin, begin + 100)
            ]
            told += [tuple(tokens[:2]) for tokens in answers(here, asked).values()]
        assert here.engine._stats.num_accepted_tokens > 100
    assert p_value(told, product_law(p, 2)) > 1e-3
