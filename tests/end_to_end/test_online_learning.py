"""A draft head that learns while it serves accepts more of narrow traffic and changes no token; a restart goes on.

The engine is in this process, so that slices are counted instead of timed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import numpy as np
import pytest

from cluster.convert import engine_config
from drafter.drafter import Drafter
from drafter.head_loader import HeadLoader
from drafter.learning.learner import Learner, learnt_heads
from drafter.proposers.eagle3 import Eagle3Head
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support.engine_here import EngineHere, Pair, engine_here
from tests.support.engines import BUNDLED, CHAIN, bundled, prompts
from tests.support.fakes import FakeChannel, over_the_wire
from verifier.adaptive.cost_model import UNPROFILED
from workers.comm import wire
from workers.comm.channel import Received
from workers.comm.ipc import Submit
from workers.comm.wire import Kind
from workers.config import EngineConfig
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.fusion import load_fusion
from workers.models.readers import read_spec
from workers.settings import SamplingSettings
from workers.types import DraftRequest, HeadProgress, NewHead, as_bytes, as_text

TARGET = BUNDLED / "target"
LENGTH = 64
SLICES = 16
"""After each message."""
MOST_ROUNDS = 24


class LearningChannel(FakeChannel):
    """The link to a drafter that learns after each reply."""

    def __init__(self, drafter: Drafter, learner: Learner, heads: HeadLoader) -> None:
        super().__init__(drafter)
        self.learner, self.heads, self.slices = learner, heads, SLICES

    def send(self, message: wire.Message, step: int) -> None:
        request = over_the_wire(message)
        if isinstance(request, NewHead):
            state = self.heads.answer(request)
            if state.progress == HeadProgress.TAKEN:
                self.learner.rebase(as_text(request.path_U))
            self._answers.append(Received(Kind.HEAD_STATE, step, over_the_wire(state)))
            return
        assert isinstance(request, DraftRequest)
        self.learner.began()
        reply = self.drafter.draft(request)
        if (learnt := self.learner.offer()) is not None:
            reply = replace(reply, learnt_U=as_bytes(learnt))
        self._answers.append(Received(Kind.DRAFT_REPLY, step, over_the_wire(reply)))
        self.learner.saw(request)
        for _ in range(self.slices):
            if self.learner.has_work:
                self.learner.work()


def config(heads: Path | str) -> EngineConfig:
    made = bundled(CHAIN, num_pages=200)
    assert made.draft is not None
    return replace(made, draft=replace(made.draft, learning_path=str(heads)))


def learns(here: EngineHere, folder: Path, heads: Path) -> LearningChannel:
    """Let an engine's drafter learn, from the head of a folder on."""
    assert here.drafter is not None
    drafter = here.drafter.drafter
    spec = read_eagle3_spec(str(folder), read_spec(str(TARGET)))
    own = drafter.proposer
    ids = own.vocab.target_ids
    assert ids is not None
    world = SimpleNamespace(tp=SimpleNamespace(size=1), role="drafter 0")
    loader = HeadLoader(world, lambda path: Eagle3Head.load(spec, path, TARGET), own.take)  # type: ignore[arg-type, attr-defined]
    learner = Learner(spec, str(folder), str(heads), own.embed, ids.clone())  # type: ignore[attr-defined]
    channel = here.engine._drafter.channel = LearningChannel(drafter, learner, loader)  # type: ignore[assignment]
    here.engine._heads._load_fuse = lambda path: load_fusion(path, spec)  # type: ignore[assignment, return-value]
    return channel  # type: ignore[return-value]


def answers(here: EngineHere, *, may_learn: bool = True) -> list[list[int]]:
    """Return the answers to requests of one kind: a few prompts, greedily and with seeds."""
    kinds = [SamplingSettings(seed=5, temperature=0.8), SamplingSettings(temperature=0.0)]
    return said(here, [(prompt, kinds[id % 2]) for id, prompt in enumerate(prompts(6), start=1)], may_learn=may_learn)


def said(
    here: EngineHere, asked: list[tuple[list[int], SamplingSettings]], length: int = LENGTH, *, may_learn: bool = True
) -> list[list[int]]:
    """Return the answers of this length."""
    told: dict[int, list[int]] = {}
    for id, (prompt, sampling) in enumerate(asked, start=1):
        own = Submit(id=id, prompt=prompt, max_tokens=length, sampling=sampling, ignore_eos=True, may_learn=may_learn)
        here.submit(own)
        told[id] = []
    left = set(told)
    while left:
        for chunk in here.step():
            assert chunk.finish_reason != "error", chunk.error
            told[chunk.id] += chunk.tokens
            if chunk.finish_reason is not None:
                left.discard(chunk.id)
    return list(told.values())


def accepted(here: EngineHere) -> float:
    """Return the accepted tokens of a draft, of these requests alone."""
    stats = here.engine._stats
    drafts, tokens = stats.num_drafts, stats.num_accepted_tokens
    answers(here)
    return (stats.num_accepted_tokens - tokens) / (stats.num_drafts - drafts)


def test_it_accepts_more_while_no_token_changes_and_a_restart_goes_on(tmp_path: Path) -> None:
    folder = BUNDLED / "eagle3"
    with engine_here(config(""), Pair.load(TARGET, folder), UNPROFILED) as here:
        plain, before = answers(here), accepted(here)
    with engine_here(config(tmp_path), Pair.load(TARGET, folder), UNPROFILED) as here:
        channel = learns(here, folder, tmp_path)
        for _ in range(MOST_ROUNDS):
            assert answers(here) == plain
            if here.swaps:
                break
        assert here.swaps and not any(swap.error for swap in here.swaps)
        channel.slices = 0
        after = accepted(here)
    assert after > before + 0.1, (before, after)
    newest = learnt_heads(tmp_path)[-1]
    with engine_here(config(tmp_path), Pair.load(TARGET, newest), UNPROFILED) as here:
        learns(here, newest, tmp_path).slices = 0
        assert answers(here) == plain and accepted(here) > before + 0.1


def test_requests_that_opted_out_teach_nothing(tmp_path: Path) -> None:
    folder = BUNDLED / "eagle3"
    with engine_here(config(tmp_path), Pair.load(TARGET, folder), UNPROFILED) as here:
        channel = learns(here, folder, tmp_path)
        answers(here, may_learn=False)
        kept = channel.learner.reservoir
        assert not kept.num_rows and not kept._open and not channel.learner.has_work
        answers(here)
        assert kept.num_rows


def test_without_learning_the_drafter_is_told_nothing_more(tmp_path: Path) -> None:
    with engine_here(config(""), Pair.load(TARGET, BUNDLED / "eagle3"), UNPROFILED) as here:
        answers(here)
        assert here.drafter is not None and all(request.learn is None for request in here.drafter.requests)


def test_the_settings_name_what_is_missing_and_a_restart_takes_the_newest_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--online-learning-path"):
        EngineArgs.load({"online_learning": "on"})
    with pytest.raises(ConfigError, match="needs a drafter"):
        EngineArgs.load({"online_learning": "on", "online_learning_path": str(tmp_path), "no_speculation": True})
    settings = {"online_learning": "on", "online_learning_path": str(tmp_path), "device": "cpu"}
    draft = engine_config(EngineArgs.load(settings)).draft
    assert draft is not None and (draft.model_path, draft.learning_path) == (str(BUNDLED / "eagle3"), str(tmp_path))
    copytree(BUNDLED / "eagle3", tmp_path / "000004")
    draft = engine_config(EngineArgs.load(settings)).draft
    assert draft is not None and draft.model_path == str(tmp_path / "000004")
    with pytest.raises(ConfigError, match="is for EAGLE-3 heads"):
        nothing_learnt = settings | {"online_learning_path": str(tmp_path / "empty")}
        engine_config(EngineArgs.load(nothing_learnt | {"speculative_config": {"model": "bundled:draft"}}))


# ---- poisoned streams: recorded messages, the learner alone

GREEDY = SamplingSettings(temperature=0.0)
TEXTS = prompts()
HELD_OUT, TAUGHT = TEXTS[::3], [text for n, text in enumerate(TEXTS) if n % 3]


def tokens(number: int) -> list[int]:
    return np.random.default_rng(number).integers(300, 2048, size=150).tolist()


POISON = {
    "random tokens": [tokens(n) for n in range(20)],
    "one token again and again": [[700 + n] * 150 for n in range(20)],
    "one pattern": [(tokens(0)[:4] * 38)[n:] for n in range(20)],
    "a pattern of each request": [tokens(n)[:4] * 38 for n in range(20)],
}
"""Texts that the target is made to say."""


def recorded(asked: list[list[int]], length: int, *, tenant: int, is_answer: bool) -> list[DraftRequest]:
    """Return what a drafter is sent for these prompts. is_answer: they count as said by the target."""
    with engine_here(config("nowhere"), Pair.load(TARGET, BUNDLED / "eagle3"), UNPROFILED) as here:
        said(here, [(prompt, GREEDY) for prompt in asked], length)
        assert here.drafter is not None
        sent = [message for message in here.drafter.requests if isinstance(message, DraftRequest)]
    for message in sent:
        assert message.learn is not None
        message.learn.tenant_B.fill_(tenant)
        message.learn.id_B.add_(1000 * tenant)
        if is_answer:
            message.learn.num_prompt_B.zero_()
    return sent


def accepted_of_held_out(folder: Path | str) -> float:
    with engine_here(config(""), Pair.load(TARGET, folder), UNPROFILED) as here:
        said(here, [(prompt, GREEDY) for prompt in HELD_OUT], 48)
        return here.engine._stats.num_accepted_tokens / here.engine._stats.num_drafts


@pytest.fixture(scope="module")
def natural() -> list[DraftRequest]:
    return recorded(TAUGHT, LENGTH, tenant=1, is_answer=False)


@pytest.fixture(scope="module")
def accepted_before() -> float:
    return accepted_of_held_out(BUNDLED / "eagle3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "poison", [pytest.param(name, marks=[] if "pattern" in name else pytest.mark.full) for name in POISON]
)
def test_a_tenant_that_floods_the_learner_costs_the_others_nothing(
    natural: list[DraftRequest], accepted_before: float, poison: str, tmp_path: Path
) -> None:
    """Nine in ten windows are the flood's."""
    folder = BUNDLED / "eagle3"
    own = Pair.load(TARGET, folder).head
    assert own.vocab.target_ids is not None
    spec = read_eagle3_spec(str(folder), read_spec(str(TARGET)))
    learner = Learner(spec, str(folder), str(tmp_path), own.embed, own.vocab.target_ids.clone())
    flood = recorded(POISON[poison], 3, tenant=2, is_answer=True)
    stream = [*natural, *(message for n in range(30) for message in (natural[n % len(natural)], flood[n % len(flood)]))]
    for message in stream:
        learner.saw(message)
        for _ in range(SLICES):
            if learner.has_work:
                learner.work()
        learner._thread.submit(int).result()
        if (better := learner.offer()) is not None:
            learner.rebase(better)
    assert learner.reservoir.num_rows > 5000
    assert accepted_of_held_out(learner._folder) > 0.95 * accepted_before
