"""A whole engine emits exactly the law of its target, a hybrid or one with latents: every random draw is enumerated.

The engine, the target with its states or latents, and the MTP drafter are the real ones. The draws of the target, of
drafts, of coins and of last tokens are choices, and the request runs once for each sequence of choices. The weights of
all runs add up to the distribution of its tokens, which must be the product of transformers' conditionals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import drafter.tree.budgeted
import verifier.acceptance.rejection
from drafter.proposers.eagle import FcHead
from drafter.tree.sample import DrawBits, DrawnChildren, Support
from tests.end_to_end.test_mixer_engine import FAMILIES
from tests.support.engine_here import EngineHere, Pair, engine_here
from tests.support.enumeration import Choose, dense, draw_by, explore
from tests.support.grammars import TinyTable, allowed_by
from tests.support.oracles import Path, distance, product_law
from verifier.acceptance.rejection import Residual
from verifier.adaptive.cost_model import UNPROFILED
from workers.comm.ipc import RequestStats, Resumption, Speculation, Submit
from workers.config import AcceptanceConfig, DraftConfig, EngineConfig, TreeConfig
from workers.kernels import reference
from workers.models.decoder import Decoder
from workers.models.fc_head_format import read_mtp_spec
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.sampling.grammar import TokenTable, grammar_text
from workers.settings import Constraints, SamplingSettings
from workers.types import SamplingBatch

torch.set_num_threads(1)

TEXTS, END = ["a", "b", "<end>"], 2
LANGUAGE, GRAMMAR = ["ab", "ba", "aab", "abb"], grammar_text("regex", "ab|ba|aab|abb")
PROMPT, SAID, LENGTH = [0, 1, 1, 0, 2], [0], 3
TOLERANCE, VISIBLE = 1e-5, 0.005

TREES = {
    "chain": TreeConfig(kind="chain", num_speculative_tokens=2),
    "static": TreeConfig(kind="static", num_speculative_tokens=3, static_paths=((0,), (1,), (1, 0))),
}
RULES = {
    "coupled": Speculation(acceptance="coupled"),
    "target only": Speculation(acceptance="rejection", draft_probs=False),
    "traversal": Speculation(acceptance="rejection"),
    "recursive": Speculation(acceptance="rejection"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    layers = {"layer_types": ["linear_attention", "full_attention"]} if family == "hybrid" else {}
    return FAMILIES[family](tmp_path_factory.mktemp(family), vocab_size=len(TEXTS), num_hidden_layers=2, **layers)


@cache
def law_of(folder: FilePath, *, has_grammar: bool) -> dict[Path, float]:
    """Return the distribution of the tokens after PROMPT and SAID by transformers' logits; nothing follows END."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    @torch.no_grad()
    def p(output: Path) -> np.ndarray:
        law = model(torch.tensor([[*PROMPT, *SAID, *output]])).logits[0, -1].double().softmax(-1).numpy()
        if has_grammar:
            law = law * [t in allowed_by(TEXTS, [END], LANGUAGE, [*SAID, *output]) for t in range(len(TEXTS))]
        return law / law.sum() if law.sum() else np.eye(len(TEXTS))[END]

    return product_law(p, LENGTH)


class Draws(Sequence[int]):
    """The target's own tokens at some rows, each drawn when it is read."""

    def __init__(self, logits_RV: torch.Tensor, choose: Choose) -> None:
        self._law_RV, self._choose, self._drawn = logits_RV.double().softmax(-1).tolist(), choose, dict[int, int]()

    def __len__(self) -> int:
        return len(self._law_RV)

    def __getitem__(self, row: Any) -> Any:
        if row >= len(self):
            raise IndexError(row)
        if row not in self._drawn:
            self._drawn[row] = self._choose(self._law_RV[row])
        return self._drawn[row]

    def tolist(self) -> Draws:
        return self


class Enumeration:
    """An engine whose random draws are choices."""

    def __init__(self, here: EngineHere, monkeypatch: pytest.MonkeyPatch, *, is_preempted: bool) -> None:
        self._here, self._is_preempted, self._id = here, is_preempted, 0
        self._choose: Choose = lambda chances: 0

        def target(logits_RV: torch.Tensor, params: SamplingBatch, *_: object) -> tuple[None, Draws]:
            return None, Draws(logits_RV, self._choose)

        def children(support: Support, count_F: np.ndarray, num_fixed_F: np.ndarray, bits: DrawBits) -> DrawnChildren:
            return draw_by(self._choose, support, count_F, num_fixed_F, bits.high_FK.shape[1])

        def coin(seed: int, root_position: int, row: int, chance: float) -> bool:
            return self._choose([chance, 1 - chance]) == 0

        def last(laws: list[Residual], log_p_BV: torch.Tensor, u_B: list[float]) -> list[int]:
            found = []
            for law, p in zip(laws, log_p_BV.double().exp().numpy(), strict=True):
                mass = dense(law, p)
                mass = mass if mass.any() else p  # after a rejection by rounding
                found.append(self._choose((mass / mass.sum()).tolist()))
            return found

        monkeypatch.setattr(reference, "coupled_argmax", target)
        monkeypatch.setattr(drafter.tree.budgeted, "draw_children", children)
        monkeypatch.setattr(verifier.acceptance.rejection, "_toss", coin)
        monkeypatch.setattr(verifier.acceptance.rejection, "_draw_residual", last)

    def law(self, submit: Submit) -> dict[Path, float]:
        """Return the distribution of the request's tokens, END repeated behind the last."""
        law: dict[Path, float] = defaultdict(float)

        def run(choose: Choose) -> Path:
            self._choose, self._id = choose, self._id + 1
            self._here.submit(replace(submit, id=self._id))
            tokens: list[int] = []
            while True:
                for chunk in self._here.step():
                    assert chunk.error is None and chunk.id == self._id
                    tokens += chunk.tokens
                    if chunk.finish_reason:
                        return (*tokens, *[END] * (LENGTH - len(tokens)))
                    if self._is_preempted:  # before the step that would fold its rows
                        self._here.engine.preempt(self._here.engine._running[0])

        for weight, tokens in explore(run):
            law[tokens] += weight
        return law


Law = dict[Path, float]


class Outcome(NamedTuple):
    """The law that an enumeration found, and how many drafts were accepted in its runs."""

    law: Law
    num_accepted: int


@pytest.fixture
def enumerate_(folder: FilePath, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    spec = read_spec(folder)
    head = FcHead.load(read_mtp_spec(folder, spec), folder, folder)
    pair = Pair(load_decoder(folder, spec), lambda states: states, head)
    monkeypatch.setattr(TokenTable, "of", lambda *_: TinyTable(TEXTS, [END]))

    def run(rule: str, tree: str, *, has_grammar: bool = False, is_preempted: bool = False) -> Outcome:
        method: Any = "recursive" if rule == "recursive" else "traversal"
        acceptance = AcceptanceConfig(rejection_method=method)
        config = EngineConfig(
            model_path=str(folder),
            draft=DraftConfig(method="mtp", model_path=str(folder), tree=TREES[tree], acceptance=acceptance),
            max_model_len=64,
            max_num_seqs=2,
            num_pages=20,
            eos_token_ids=(END,),
        )
        submit = Submit(
            id=0,
            prompt=PROMPT,
            max_tokens=len(SAID) + LENGTH,
            sampling=SamplingSettings(constraints=Constraints(grammar=GRAMMAR if has_grammar else "")),
            ignore_eos=not has_grammar,
            speculation=RULES[rule],
            resumption=Resumption(output=SAID, num_prompt_logprobs=0, stats=RequestStats()),
        )
        with engine_here(config, pair, UNPROFILED) as here:
            law = Enumeration(here, monkeypatch, is_preempted=is_preempted).law(submit)
            assert (here.engine._stats.num_preemptions > 0) == is_preempted
            return Outcome(law, here.engine._stats.num_accepted_tokens)

    return run


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rule", RULES)
def test_texts_follow_the_law_of_the_target(
    enumerate_: Callable[..., Outcome], folder: FilePath, rule: str, tree: str
) -> None:
    law, num_accepted = enumerate_(rule, tree)
    assert num_accepted > 0
    assert distance(law, law_of(folder, has_grammar=False)) < TOLERANCE


@pytest.mark.parametrize("rule", RULES)
def test_texts_follow_the_law_within_a_grammar(enumerate_: Callable[..., Outcome], folder: FilePath, rule: str) -> None:
    law, num_accepted = enumerate_(rule, "static", has_grammar=True)
    assert num_accepted > 0
    assert distance(law, law_of(folder, has_grammar=True)) < TOLERANCE


@pytest.mark.parametrize("rule", ["coupled", "traversal"])
def test_preemptions_between_steps_keep_the_law(
    enumerate_: Callable[..., Outcome], folder: FilePath, rule: str
) -> None:
    """The rows that the next step would fold into states, or move to their places, are dropped."""
    law, _ = enumerate_(rule, "static", is_preempted=True)
    assert distance(law, law_of(folder, has_grammar=False)) < TOLERANCE


def test_accepted_rows_that_leave_no_trace_are_detected(
    enumerate_: Callable[..., Outcome], folder: FilePath, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not folded into a hybrid's states, or latents are not moved to their places."""
    if family == "hybrid":
        monkeypatch.setattr(Decoder, "fold", lambda *_: None)
    else:
        monkeypatch.setattr(reference, "copy_slots", lambda *_: None)
    law, _ = enumerate_("coupled", "static")
    assert distance(law, law_of(folder, has_grammar=False)) > VISIBLE
