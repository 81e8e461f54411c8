"""Draws one step's tree of the bundled pair, with accepted, rejected and pruned nodes.

python -m tests.bench.draw_tree [--prompt TEXT] [--step 2] [--nodes 12] [--min-prob 0.15]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from cluster.http.tokenizer import Tokenizer
from tests.support.engine_here import Pair, engine_here
from tests.support.engines import BUNDLED, DYNAMIC, bundled
from verifier import engine as engine_module
from workers.comm.ipc import Speculation, Submit
from workers.types import SamplingParams, TreeBatch, Verdict

Path = tuple[int, ...]


class Step(NamedTuple):
    """One verification: the tree as paths of tokens, and the accepted ones."""

    position: int
    paths: list[Path]
    accepted: set[Path]


def steps(pair: Pair, prompt: list[int], nodes: int, min_prob: float) -> list[Step]:
    """Run one greedy request and record its verifications."""
    seen: list[Step] = []

    def verify(trees: TreeBatch, *args: Any, root_position_B: list[int], **named: Any) -> list[Verdict]:
        verdicts = real(trees, *args, root_position_B=root_position_B, **named)
        paths: list[Path] = []
        for token, parent in zip(trees.token_N.tolist(), trees.parent_N.tolist(), strict=True):
            paths.append((*paths[parent], token) if parent >= 0 else (token,))
        seen.append(Step(root_position_B[0], paths, {paths[row] for row in (0, *verdicts[0].path)}))
        return verdicts

    real = engine_module.verify
    config = replace(bundled(replace(DYNAMIC, num_speculative_tokens=nodes)), num_pages=64, max_num_seqs=1)
    speculation = Speculation(num_speculative_tokens=nodes, auto=False, min_prob=min_prob, path_prob=0.0)
    with mock.patch.object(engine_module, "verify", verify), engine_here(config, pair) as engine:
        sampling = SamplingParams(temperature=0.0)
        engine.submit(Submit(id=1, prompt=prompt, max_tokens=48, sampling=sampling, speculation=speculation))
        while not any(chunk.finish_reason for chunk in engine.step()):
            pass
    return seen[1:]  # the first is the prompt's own token


def draw(whole: Step, pruned: Step, tokenizer: Tokenizer) -> list[str]:
    """Return the unpruned tree's lines; nodes that the pruned tree lacks are marked."""
    kept, lines = set(pruned.paths), [repr(tokenizer.decode(whole.paths[0][-1:])) + "   root"]

    def add(path: Path, indent: str) -> None:
        children = [own for own in whole.paths if own[:-1] == path]
        for number, child in enumerate(children):
            is_last = number == len(children) - 1
            mark = "accepted" if child in pruned.accepted else "rejected" if child in kept else "pruned, not verified"
            text = f"{indent}{'└─' if is_last else '├─'} {tokenizer.decode(child[-1:])!r}"
            lines.append(f"{text:44}{mark}")
            add(child, indent + ("   " if is_last else "│  "))

    add(whole.paths[0], "")
    return lines


def main() -> None:
    """Print the tree of the requested step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="def quicksort(items):\n")
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--min-prob", type=float, default=0.15)
    asked = parser.parse_args()
    tokenizer, pair = Tokenizer(str(BUNDLED / "target")), Pair.load(BUNDLED / "target", BUNDLED / "eagle3")
    prompt = tokenizer.encode(asked.prompt)
    pruned = steps(pair, prompt, asked.nodes, asked.min_prob)
    at = {step.position: step for step in steps(pair, prompt, asked.nodes, 0.0)}
    common = [step for step in pruned if step.position in at]
    step = common[min(asked.step, len(common) - 1)]
    print("\n".join(draw(at[step.position], step, tokenizer)))


if __name__ == "__main__":
    main()
