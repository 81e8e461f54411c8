"""Measures which outcomes of a verification pre-drafting can predict, which bounds the share of drafting it can hide.

    python -m tests.bench.outcomes --model smollm2 --drafter bundled:smollm2-eagle3 --prompts FILE

One request at a time. Prints, per temperature and nodes of a tree, the share of steps whose outcome (accepted path and
bonus token) was among the likeliest 1, 4, ... predictions, and among all that look at 64 tokens of every node.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from cluster.bench.setup import workload
from drafter import predraft
from drafter.predraft import PreDrafter
from drafter.tree.policy import make_tree_policy
from drafter.worker import grow_trees
from secateur.config import EngineArgs
from secateur.prompts import read_prompts
from tests.bench.overlap import BUNDLED_PROMPTS
from tests.support.engine_here import EngineHere, Pair, engine_here
from workers.comm.ipc import Submit
from workers.config import EngineConfig
from workers.settings import SamplingSettings
from workers.types import DraftReply, DraftRequest

RANKS = (1, 4, 16, 64, 256)
NUM_PAGES = 256


class Predictions(PreDrafter):
    """Predicts outcomes and drafts for none. `ranks` says where in the order of predictions each true outcome was."""

    def __init__(self, here: EngineHere, config: EngineConfig) -> None:
        assert here.drafter is not None and config.draft is not None
        proposer: Any = here.drafter._proposer
        grow = partial(grow_trees, proposer=proposer, policy=make_tree_policy(config.draft.tree))
        super().__init__(
            proposer, grow, page_size=config.page_size, scratch=range(1 << 16), outcome_pages=1, is_forced=True
        )
        self._fanout = len(self._scratch_OP)
        self._predicted: list[tuple[int, ...]] | None = None
        self.ranks: list[int | None] = []

    def reply(self, request: DraftRequest, *, has_waited: bool = False) -> DraftReply:
        if self._predicted is not None and request.num_nodes_B.tolist() != [0]:
            outcome = tuple(request.token_M.tolist())
            self.ranks.append(self._predicted.index(outcome) if outcome in self._predicted else None)
        return super().reply(request, has_waited=has_waited)

    @torch.inference_mode()
    def draft_ahead(self, is_interrupted: object) -> None:
        request, roots, self._predicted = self._request, self._roots, None
        if request is None or not (request.num_nodes_B > 0).any():
            return
        logits_GV = roots() if callable(roots) else roots
        assert isinstance(logits_GV, torch.Tensor)
        predictions = self._predict(request, logits_GV, lambda: False) or []
        tokens = self._trees.token_N.tolist()
        self._predicted = [(*(tokens[row] for row in p.path), p.bonus) for p in predictions]


def shares(pair: Pair, config: EngineConfig, prompts: list[list[int]], max_tokens: int, temperature: float) -> str:
    """Answer the prompts and return the row's columns."""
    with engine_here(config, pair) as here:
        assert here.drafter is not None
        here.drafter._ahead = predictions = Predictions(here, config)
        for id, prompt in zip(count(), prompts, strict=False):
            sampling = SamplingSettings(temperature=temperature, seed=id)
            here.submit(Submit(id=id, prompt=prompt, max_tokens=max_tokens, sampling=sampling, ignore_eos=True))
            while not any(chunk.finish_reason for chunk in here.step()):
                pass
            predictions._predicted = None
        ranks = predictions.ranks
        columns = [sum(rank is not None and rank < most for rank in ranks) / len(ranks) for most in RANKS]
        columns.append(sum(rank is not None for rank in ranks) / len(ranks))
    return " | ".join([str(len(ranks)), *(f"{share:.2f}" for share in columns)])


def main() -> None:
    """Print one line per temperature and size of tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:target")
    parser.add_argument("--drafter", default="bundled:eagle3")
    parser.add_argument("--prompts", type=Path, default=BUNDLED_PROMPTS, help="as for `secateur bench`")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    predraft.NUM_CANDIDATES, predraft._MIN_CHANCE = 64, 0.0
    texts = read_prompts(options.prompts, options.num_prompts)
    print("| T | nodes | steps | " + " | ".join(f"best {most}" for most in RANKS) + " | all |")
    print("| --- |" + " --- |" * (3 + len(RANKS)))
    pair = None
    for nodes in options.nodes:
        draft = {"model": options.drafter, "num_speculative_tokens": nodes, "overlap": "none"}
        args = EngineArgs.load(
            {"model": options.model, "device": "cpu", "speculative_config": {**draft, "speculative_tree_prune": "off"}}
        )
        config, prompts = workload(args, texts, max_tokens=options.max_tokens, max_num_seqs=1)
        config = replace(config, num_pages=NUM_PAGES, enable_prefix_caching=False)
        assert config.draft is not None
        pair = pair or Pair.load(config.model_path, config.draft.model_path)
        for temperature in options.temperatures:
            columns = shares(pair, config, prompts, options.max_tokens, temperature)
            print(f"| {temperature:g} | {nodes} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
