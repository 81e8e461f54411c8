"""A draft model with fewer or more tokens than its target: the first ones are drafted, and the law is the target's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter.proposers.base import DraftModelProposer, Proposer, shared_vocabulary
from tests.end_to_end.test_engine_laws import p_value
from tests.support import checkpoints
from tests.support.engine_here import EngineHere, Pair, engine_here
from tests.support.oracles import product_law
from verifier.adaptive.cost_model import UNPROFILED
from workers.comm.ipc import Speculation, Submit
from workers.config import DraftConfig, EngineConfig, TreeConfig
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.settings import SamplingSettings
from workers.types import DraftReply

torch.set_num_threads(1)

V, PAGES, PROMPT = 6, 400, [3, 1, 4, 1, 5]
TREE = TreeConfig(num_speculative_tokens=6, max_depth=3, max_children=3)
SIZES = pytest.mark.parametrize("size", [4, 9])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_model(tmp_path_factory.mktemp("target"), "llama", vocab_size=V, num_hidden_layers=1)


@contextmanager
def engine(target: Path, size: int | None, tmp_path: Path) -> Iterator[tuple[EngineHere, list[DraftReply]]]:
    """Yield an engine whose draft model has `size` tokens, and the drafts that it will have got."""
    replies: list[DraftReply] = []
    path = checkpoints.write_model(tmp_path, "qwen2", vocab_size=size or V, num_hidden_layers=1)
    decoder, draft = (
        load_decoder(target, read_spec(target)),
        DraftConfig(method="draft_model", model_path=str(path), tree=TREE),
    )

    def proposer(head: object, kv: object, page_size: int, tree_rows: int) -> Proposer:
        model = load_decoder(path, read_spec(path))
        return DraftModelProposer(model, shared_vocabulary(model, V), model.new_kv_pool(PAGES * page_size), page_size)

    config = EngineConfig(
        model_path=str(target), draft=draft if size else None, max_model_len=64, max_num_seqs=64, num_pages=PAGES
    )
    pair = Pair(decoder, lambda states: states, decoder)  # type: ignore[arg-type]  # no head is used
    with engine_here(config, pair, UNPROFILED, proposer=proposer) as here:
        if here.drafter is not None:
            drafter = here.drafter.drafter
            draft_of = drafter.draft
            drafter.draft = lambda message: replies.append(draft_of(message)) or replies[-1]  # type: ignore[method-assign]
        yield here, replies


def texts(here: EngineHere, rule: str, temperature: float, count: int) -> list[tuple[int, ...]]:
    told: list[tuple[int, ...]] = []
    for begin in range(0, count, 100):
        tokens: dict[int, list[int]] = {}
        for seed in range(begin, min(begin + 100, count)):
            sampling, speculation = SamplingSettings(temperature=temperature, seed=seed), Speculation(acceptance=rule)  # type: ignore[arg-type]
            here.submit(Submit(id=seed, prompt=PROMPT, max_tokens=6, sampling=sampling, ignore_eos=True,
                               speculation=speculation))  # fmt: skip
            tokens[seed] = []
        while any(len(own) < 6 for own in tokens.values()):
            for chunk in here.step():
                assert chunk.error is None
                tokens[chunk.id] += chunk.tokens
        told += map(tuple, tokens.values())
    return told


@SIZES
def test_coupled_tokens_equal_those_without_a_drafter(target: Path, tmp_path: Path, size: int) -> None:
    told = []
    for number, own in enumerate((None, size)):
        with engine(target, own, tmp_path / str(number)) as (here, replies):
            told.append([texts(here, "coupled", temperature, 60) for temperature in (0.0, 1.0)])
    drafted = {token for reply in replies for token in reply.trees.token_N[reply.trees.depth_N > 0].tolist()}
    assert told[0] == told[1] and drafted == set(range(min(size, V)))
    assert here.engine._stats.num_accepted_tokens > 50
    assert {token for text in told[0][1] for token in text} == set(range(V))


@SIZES
def test_texts_of_sampled_drafts_follow_the_target_s_law(target: Path, tmp_path: Path, size: int) -> None:
    """The joint distribution of the first two tokens of many seeds is the product of transformers' conditionals."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    @torch.no_grad()
    def p(output: tuple[int, ...]) -> np.ndarray:
        logits = model(torch.tensor([[*PROMPT, *output]])).logits[0, -1].double()
        return logits.softmax(-1).numpy()

    with engine(target, size, tmp_path) as (here, replies):
        told = texts(here, "rejection", 1.0, 600)
        assert here.engine._stats.num_accepted_tokens > 100
    assert all(reply.probs is None or int(reply.probs.id_S.max()) < min(size, V) for reply in replies)
    assert p_value([text[:2] for text in told], product_law(p, 2)) > 1e-3
