"""Records the answers of real engines, or compares them with a record, to show that a change keeps every token.

    python -m bench.seeded_outputs record bench/results/seeded-outputs.json
    python -m bench.seeded_outputs compare bench/results/seeded-outputs.json

Greedy and coupled answers are the same on every machine, up to near-ties in floating point. Answers under `rejection`
depend on the shape of the trees, so requests run one at a time and `auto` is off.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.end_to_end.test_methods import METHODS, some_prompts
from tests.support.engines import AUTO, CHAIN, DYNAMIC, STATIC, GenerationJob, Runner, bundled, prompts, pruned
from workers.config import AcceptanceConfig, EngineConfig
from workers.settings import Constraints, SamplingSettings

NUM_TOKENS = 32
SAMPLINGS = {
    "greedy": SamplingSettings(temperature=0.0),
    "T 0.7, top-p 0.9": SamplingSettings(temperature=0.7, top_p=0.9, seed=11),
    "T 1": SamplingSettings(temperature=1.0, seed=(1 << 64) - 3),
    "T 1.3, top-k 20, min-p 0.02": SamplingSettings(temperature=1.3, top_k=20, min_p=0.02, seed=14),
    "T 1, penalties": SamplingSettings(
        temperature=1.0, seed=15, constraints=Constraints(repetition_penalty=1.2, presence_penalty=0.5, min_tokens=8)
    ),
}

Record = dict[str, dict[str, list[list[int]]]]
"""engine -> sampling -> the tokens of each prompt's answer."""


def engines(folder: Path) -> Iterator[tuple[str, EngineConfig]]:
    """Return every method, kind of tree and acceptance rule, and two verifier ranks. folder: for checkpoints."""
    yield "no speculation", bundled()
    yield "eagle3, chain", bundled(CHAIN)
    yield "eagle3, static tree", bundled(STATIC)
    yield "eagle3, dynamic tree", bundled(DYNAMIC)
    yield "eagle3, pruned tree", bundled(pruned(min_prob=0.2, path_prob=0.05))
    yield "eagle3, auto", bundled(AUTO)
    yield "draft model, dynamic tree", bundled(DYNAMIC, method="draft_model")
    yield "eagle3, dynamic tree, TP 2", bundled(DYNAMIC, tp=2)
    yield "draft model, dynamic tree, TP 2, draft TP 2", bundled(DYNAMIC, method="draft_model", tp=2, draft_tp=2)
    for method in ("traversal", "recursive"):
        rule = AcceptanceConfig(kind="rejection", rejection_method=method)
        for shape, tree in (("chain", CHAIN), ("dynamic tree", DYNAMIC)):
            yield f"eagle3, {shape}, rejection by {method}", _with_rule(bundled(tree), rule)
    rule = AcceptanceConfig(kind="rejection", draft_probs=False)
    yield "eagle3, dynamic tree, rejection without draft probabilities", _with_rule(bundled(DYNAMIC), rule)
    for number, (name, make) in enumerate(METHODS.items()):
        yield name, make(folder / str(number))


def _with_rule(config: EngineConfig, rule: AcceptanceConfig) -> EngineConfig:
    assert config.draft is not None
    return replace(config, draft=replace(config.draft, acceptance=rule))


def record(num_prompts: int) -> Record:
    found: Record = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in engines(Path(folder)):
            print(name, file=sys.stderr, flush=True)
            with Runner(config) as runner:
                own = some_prompts(runner) if name in METHODS else prompts(num_prompts)
                found[name] = {
                    sampling: [answer.tokens for answer in runner.run([_job(prompt, params) for prompt in own])]
                    for sampling, params in SAMPLINGS.items()
                }
    return found


def _job(prompt: list[int], params: SamplingSettings) -> GenerationJob:
    return GenerationJob(prompt=prompt, max_tokens=NUM_TOKENS, sampling=params)


def differences(before: Record, after: Record) -> list[str]:
    """Return a line for each engine and sampling whose answers differ or that only one record has."""
    keys = {(engine, sampling) for found in (before, after) for engine, rows in found.items() for sampling in rows}
    return [
        f"{engine}; {sampling}"
        for engine, sampling in sorted(keys)
        if before.get(engine, {}).get(sampling) != after.get(engine, {}).get(sampling)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--num-prompts", type=int, default=4)
    asked = parser.parse_args()
    found = record(asked.num_prompts)
    if asked.action == "record":
        asked.file.write_text(json.dumps(found))
        return 0
    different = differences(json.loads(asked.file.read_text()), found)
    print("\n".join(different) or "every answer is as recorded")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
