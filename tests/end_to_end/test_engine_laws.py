"""Every acceptance rule in the whole engine: the joint distribution of a request's first tokens is the target's.

Tokens with the right marginals may still be dependent if two steps share noise. So whole texts of many requests that
differ by seed alone are compared with the exact distribution of all texts of that length. Requests of every kind are in
one batch, over a language of three tokens. Seeds are fixed, so the tests are deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests.support import oracles
from tests.support.fakes import Bench, RandomLanguage, say
from tests.support.oracles import Path, product_law
from workers.comm.ipc import Speculation
from workers.config import AcceptanceConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.settings import Constraints, SamplingSettings

torch.set_num_threads(1)

V, LENGTH, PROMPT = 3, 4, [0, 2, 1, 1, 0, 2]
MIN_EXPECTED = 8
"""Texts expected less often than this are counted as one."""
LEAST_P = 1e-4


class Mild(RandomLanguage):
    """A language without rare texts and a drafter that is often wrong, so that rejections are frequent."""

    def __init__(self) -> None:
        super().__init__(vocab=V, error=2.0, seed=5)

    def target(self, context: list[int]) -> np.ndarray:
        return super().target(context) / 2


LANGUAGE = Mild()


@dataclass(frozen=True)
class Kind:
    """Return requests that differ by seed alone."""

    num: int
    sampling: SamplingSettings = SamplingSettings()
    speculation: Speculation = Speculation()

    def law(self, length: int) -> dict[Path, float]:
        """Return the exact distribution of the first tokens."""
        own = self.sampling

        def p(output: Path) -> np.ndarray:
            logits = LANGUAGE.target([*PROMPT, *output]).astype(np.float64)
            edited = oracles.constrain(dict(enumerate(logits)), own.constraints, (), tuple(PROMPT), output)
            x = oracles.process([edited[t] for t in range(V)], own.temperature, own.top_k, own.top_p, own.min_p)
            return np.array(oracles.softmax(x))

        return product_law(p, length)


REJECTION = Speculation(acceptance="rejection")
DETERMINISTIC, PLAIN = replace(REJECTION, draft_probs=False), Speculation(enabled=False)
SAMPLED_KINDS = {
    "rejection": Kind(700, speculation=REJECTION),
    "rejection of short drafts": Kind(200, speculation=replace(REJECTION, num_speculative_tokens=1)),
    "rejection without drafts": Kind(200, speculation=replace(REJECTION, num_speculative_tokens=0)),
    "rejection at another temperature": Kind(300, SamplingSettings(temperature=1.6, top_k=2), REJECTION),
    "rejection under penalties": Kind(
        300,
        SamplingSettings(constraints=Constraints(frequency_penalty=0.6, repetition_penalty=1.3, bad_words=[[1, 2]])),
        REJECTION,
    ),
}
FEW = {
    "coupled": Kind(30),
    "deterministic drafts": Kind(30, speculation=DETERMINISTIC),
    "plain": Kind(30, speculation=PLAIN),
    "greedy": Kind(10, SamplingSettings(temperature=0.0), REJECTION),
}
"""What these say follows from seed and position alone, so few suffice: they are compared token by token."""


@dataclass(frozen=True)
class Service:
    """The settings of an engine's drafter."""

    tree: TreeConfig = TreeConfig(kind="dynamic", num_speculative_tokens=5, max_depth=3, max_children=2)  # noqa: RUF009
    method: Literal["eagle3", "draft_model"] = "eagle3"
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    has_leaf_siblings: bool = False


CHAIN = TreeConfig(kind="chain", num_speculative_tokens=3)
STATIC = TreeConfig(kind="static", num_speculative_tokens=4, static_paths=((0,), (1,), (0, 0), (1, 0)))
RECURSIVE = AcceptanceConfig(rejection_method="recursive")
SERVICES = {
    "traversal, chain": Service(CHAIN),
    "traversal, tree": Service(),
    "recursive, chain": Service(CHAIN, acceptance=RECURSIVE),
    "recursive, tree": Service(STATIC, "draft_model", RECURSIVE),
    "traversal, siblings are leaves": Service(
        TreeConfig(num_speculative_tokens=6, max_depth=3, max_children=2), has_leaf_siblings=True
    ),
    "traversal, hybrid": Service(STATIC, acceptance=AcceptanceConfig(sample_method="hybrid")),
    "recursive, hybrid": Service(acceptance=replace(RECURSIVE, sample_method="hybrid")),
    "thresholds": Service(
        TreeConfig(
            num_speculative_tokens=6, max_depth=3, max_children=3, prune=PruneConfig(min_prob=0.4, path_prob=0.15)
        )
    ),
    "auto": Service(
        TreeConfig(
            num_speculative_tokens=6,
            max_depth=3,
            max_children=3,
            prune=PruneConfig(
                auto=True, simulated_costs=SimulatedCosts(step_ms=1.0, row_ms=0.001, draft_ms=0.05, level_ms=0.05)
            ),
        )
    ),
}


class Crowd(Bench):
    """Run many short requests, a hundred at a time."""

    def step(self) -> None:
        self.engine._step()  # as `Engine.run` does
        self._read()

    def texts(self, kinds: dict[str, Kind]) -> dict[str, dict[int, Path]]:
        """Return the first tokens of each kind's requests by seed; requests of all kinds are mixed."""
        order = [kind for kind, of in kinds.items() for _ in range(of.num)]
        np.random.default_rng(0).shuffle(order)
        for seed, kind in enumerate(order):  # also its id here
            # So much longer that drafts reach beyond what is counted.
            sampling = replace(kinds[kind].sampling, seed=seed)
            self.submit(PROMPT, LENGTH + 3, sampling, speculation=kinds[kind].speculation)
            while len(self.open) >= 100:
                self.step()
        self.run()
        texts: dict[str, dict[int, Path]] = {kind: {} for kind in kinds}
        for seed, kind in enumerate(order):
            texts[kind][seed] = tuple(self.answers[seed].tokens[:LENGTH])
        return texts


def crowd(how: Service) -> Crowd:
    return Crowd(
        LANGUAGE,
        how.method,
        how.tree,
        num_pages=1500,
        max_num_seqs=100,
        acceptance=how.acceptance,
        has_leaf_siblings=how.has_leaf_siblings,
    )


def p_value(texts: Collection[Path], law: dict[Path, float]) -> float:
    """Return the p-value of a chi-square test of texts against the distribution."""
    seen = Counter(texts)
    assert not any(count and not law[text] for text, count in seen.items()), "an impossible text"
    often = [text for text in law if law[text] * len(texts) >= MIN_EXPECTED]
    rare = [text for text in law if 0 < law[text] * len(texts) < MIN_EXPECTED]
    observed = [*(seen[text] for text in often), sum(seen[text] for text in rare)]
    expected = [*(law[text] * len(texts) for text in often), sum(law[text] for text in rare) * len(texts)]
    if not rare:
        observed, expected = observed[:-1], expected[:-1]
    return float(chisquare(observed, np.array(expected) * len(texts) / sum(expected)).pvalue)


def assert_law(texts: dict[str, dict[int, Path]], kinds: dict[str, Kind]) -> None:
    """Test whole texts and their first two tokens, whose fewer outcomes show weaker dependence."""
    for kind, of in kinds.items():
        for length in (2, LENGTH):
            p = p_value([text[:length] for text in texts[kind].values()], of.law(length))
            assert p > LEAST_P, f"the first {length} tokens of {kind}: p = {p:.1e}"


MORE_OF_A_KIND = ("traversal, chain", "recursive, chain", "recursive, hybrid")


@pytest.mark.parametrize(
    "service", [pytest.param(name, marks=pytest.mark.full if name in MORE_OF_A_KIND else []) for name in SERVICES]
)
def test_whole_texts_of_sampled_drafts_follow_the_targets_law(service):
    with crowd(SERVICES[service]) as engine:
        texts = engine.texts(SAMPLED_KINDS | FEW)
        stats = engine.frames[-1].stats
    assert 0 < stats.num_accepted_tokens < stats.num_verified_tokens
    assert_law(texts, SAMPLED_KINDS)
    for kind, of in FEW.items():
        for seed, text in texts[kind].items():
            assert list(text) == say(LANGUAGE, PROMPT, LENGTH, replace(of.sampling, seed=seed)), kind


def test_whole_texts_of_coupled_drafts_follow_the_targets_law():
    kinds = {kind: replace(FEW[kind], num=700) for kind in ("coupled", "deterministic drafts", "plain")}
    with crowd(SERVICES["traversal, tree"]) as engine:
        texts = engine.texts(kinds)
    assert_law(texts, kinds)


class Changing(Mild):
    """A draft model that is another one at every step."""

    is_other = False

    def draft(self, context: list[int]) -> np.ndarray:
        return self.target(context) + (self._wrong.T if self.is_other else self._wrong)[context[-1]]


CHANGING = Changing()


class Swapping(Crowd):
    def step(self) -> None:
        CHANGING.is_other = not CHANGING.is_other
        super().step()


def test_whole_texts_follow_the_targets_law_although_the_head_changes_between_any_two_steps() -> None:
    how = Service()
    with Swapping(CHANGING, how.method, how.tree, num_pages=1500, max_num_seqs=100) as engine:
        texts = engine.texts(SAMPLED_KINDS)
        stats = engine.frames[-1].stats
    assert 0 < stats.num_accepted_tokens < stats.num_verified_tokens
    assert_law(texts, SAMPLED_KINDS)
