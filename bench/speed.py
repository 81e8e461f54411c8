"""Time per token and tokens per second, beside other projects: python -m bench.speed.

All contestants stay loaded and take turns, so that other load on the machine affects them alike. Every round uses the
next prompts and reverses the order of contestants. Results are medians over the rounds, also of the ratios.

A contestant's ceiling is its speedup over our engine without speculation if only the two models took time: tokens per
step x V(1) / (V(N+1) + D), where V is the forward of the target and D is drafting.

Example: python -m bench.speed --target-cost 300m --batches 1 8 --contestants off,chain,auto,generate
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.contestants import (
    Contestant,
    SecateurContestant,
    TransformersContestant,
    Turn,
    assistant,
    load_model,
)
from bench.harness import Run, main, scaled
from bench.peers import NOTES as PEER_NOTES
from bench.peers import launches, started, version_of
from bench.plans import ALONE, PEERS, TRANSFORMERS, ContestantName, SpeedPlan
from bench.sequoia import acceptance_table, best_tree
from cluster.bench.breakdown import StepBreakdown, median_steps
from cluster.bench.report import Report, Row
from cluster.bench.runner import GenerationJob, Runner
from cluster.bench.setup import workload
from cluster.convert import model_folder
from cluster.openai.request_params import derive_seed
from cluster.planner.memory import device_loads, model_shards, sizes_in_bits
from secateur.bench import check_drafter
from secateur.cli.bench import say
from secateur.config import BUNDLED_TARGET, EngineArgs
from workers.comm.ipc import Speculation
from workers.config import DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.gc_freeze import freeze_start_up
from workers.kernels import linear
from workers.models.checkpoint import Weights
from workers.models.readers import read_spec
from workers.settings import SamplingSettings

CHAIN_ACCEPTANCE = (0.78, 0.77, 0.77, 0.77, 0.75, 0.75, 0.72, 0.7)
STAR_ACCEPTANCE = {1: 0.78, 2: 0.89, 4: 0.95, 8: 0.98}
"""Acceptance of the bundled pair at temperature 0, measured with `bench.acceptance`.

The chain is the first child's by depth, the star that of any of the first k children. Sequoia's tree for these is the
static contestant.
"""

WARM_TOKENS = 8
FIRST_TOKENS = 4
"""Tokens of the answers to long prompts: requests of fewer tokens get no drafts."""
WITH_SMALL_MODEL: tuple[ContestantName, ...] = ("assisted", "draft_model")
"""Contestants that draft with a small model of the target's family."""

NOTES = (
    "all contestants answer the same prompts with the same number of tokens and take turns, each round the next "
    "prompts; medians over the rounds",
    "before each new number of requests or temperature ours and peers take a turn that does not count: auto learns "
    "what it costs, others may compile",
    "TPOT is time per output token after the first, mean over the requests; ratios are to our own engine without "
    "speculation in the same round",
    "on CPU in float32 everybody but peers has one thread per process: ours is two processes, drafter and verifier; "
    "generate_2_threads is transformers with as many cores",
    "on CPU transformers has small blocks in huge pages, as ours has, if the benchmark was started with "
    "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 (`make bench` is)",
    "generate answers requests in full batches, padded on the left; assisted generation and prompt lookup one by one",
    "step_gain: by steps in which all requests decode, no prompt is computed and none has finished; ceiling: "
    "tokens/step x V(1) / (V(N+1) + D), from the same steps; ceiling_share: of the ceiling that they reach",
    "same_tokens: requests whose tokens are those without speculation; transformers draws other noise at T > 0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """One contestant at one temperature and number of requests."""

    contestant: str
    temperature: float
    batch: int
    ttft_ms: float
    tpot_ms: float
    tpot_ratio: float
    """TPOT without speculation over its own TPOT: above 1 is faster."""
    tokens_per_second: float
    throughput_ratio: float
    same_tokens: float
    tpot_spread: float | None = None
    """Between the slowest and the fastest round, as a share of the median. None in results from before."""
    bytes_per_weight: float | None = None
    """None in results from before it was measured."""
    acceptance_length: float | None = None
    """Tokens per verified draft; None where nothing is drafted, or the contestant does not tell."""
    # Of our own engine's decoding steps; None for all others.
    tokens_per_step: float | None = None
    verified_per_step: float | None = None
    step_gain: float | None = None
    """Decoding speed over these steps, relative to no speculation."""
    ceiling: float | None = None
    ceiling_share: float | None = None


def measure(run: Run) -> Report:
    """Measure. Raises ConfigError before anything is started, EngineDead and PeerFailed."""
    plan: SpeedPlan = run.plan
    check_drafter(run.args, plan.nodes)
    texts = run.texts(max(plan.num_prompts, *plan.batches) * plan.rounds)
    with scaled(run.args, plan.target_cost, plan.cache, say) as args:
        config, tokens = workload(args, texts, max_tokens=plan.max_tokens, max_num_seqs=max(plan.batches))
        if plan.prompt_tokens:
            longest = max(config.max_model_len, max(plan.prompt_tokens) + FIRST_TOKENS)
            pages = max(config.num_pages or 0, 1 + config.pages_for(longest))
            config = replace(config, max_model_len=longest, num_pages=pages)
        launched = launches([c for c in plan.contestants if c in PEERS], args, config, plan, Path(plan.peers))
        versions = {launch.peer: version_of(launch) for launch in launched}
        more = {"peers": versions} if versions else {"peers": None, "peer_threads": None}
        with (
            run.report("speed", config, NOTES + PEER_NOTES if versions else NOTES, **more) as report,
            _contestants(config, plan, _assistant_folder(run.args), report) as contestants,
            started(launched, say) as others,
        ):
            for row in _first_tokens(contestants, plan):
                _add(report, "first tokens", row)
            for speed, steps in _measure([*contestants, *others], plan, tokens):
                _add(report, "speed", speed)
                if steps is not None:
                    key = {"contestant": speed.contestant, "temperature": speed.temperature, "batch": speed.batch}
                    _add(report, "a decoding step", key | steps.row)
    return report


def _add(report: Report, table: str, row: Any) -> None:
    """Add a row, and say it, so that it is not lost if the process is killed before it writes the report."""
    say(f"{table}: {json.dumps(report.add(table, row))}")


def _assistant_folder(args: EngineArgs) -> Path | None:
    """Return the small model for assisted generation and our draft model, or None if the target has none."""
    spec = args.speculative_config
    if spec is not None and spec.method == "draft_model" and spec.model is not None:
        return model_folder(spec.model)
    return model_folder("bundled:draft") if args.model == BUNDLED_TARGET else None


# -- contestants ----------------------------------------------------------------------------------------------------


@contextmanager
def _contestants(
    config: EngineConfig, plan: SpeedPlan, small: Path | None, report: Report
) -> Iterator[list[Contestant]]:
    """Start all contestants but the peers. On CPU this process computes with one thread, as the engines do."""
    assert config.draft is not None
    threads = torch.get_num_threads()
    asked = [name for name in plan.contestants if name not in PEERS]
    names = [name for name in asked if small is not None or name not in WITH_SMALL_MODEL]
    if len(names) < len(asked):
        say(f"{' and '.join(WITH_SMALL_MODEL)} draft with a small model, and none belongs to this target: left out")
    with ExitStack() as stack:
        if config.device == "cpu":
            torch.set_num_threads(1)
            stack.callback(torch.set_num_threads, threads)
        weight_bytes = bytes_per_weight(config)
        engines: dict[DraftConfig | None, Runner] = {}
        found: list[Contestant] = []
        for name in names:
            if name in TRANSFORMERS:
                continue
            with_drafter = plan.contestants[-1] if plan.shared and name == "off" else name
            drafter = drafter_of(with_drafter, config.draft, plan, small)
            if drafter not in engines:
                say(f"starting {with_drafter}")
                free, began = _free_bytes(config), time.perf_counter()
                engines[drafter] = stack.enter_context(Runner(replace(config, draft=drafter)))
                _add(report, "start", _start(engines[drafter], began, free - _free_bytes(config)))
            found.append(
                SecateurContestant(
                    name=name,
                    runner=engines[drafter],
                    bytes_per_weight=weight_bytes,
                    speculation=Speculation(enabled=name != "off", auto=name == "auto"),
                )
            )
        if modes := [name for name in names if name in TRANSFORMERS]:
            say(f"loading {', '.join(modes)}")
            found += _transformers(modes, config, plan, small)
            freeze_start_up()  # as our processes do
        yield found


def _free_bytes(config: EngineConfig) -> int:
    return torch.cuda.mem_get_info()[0] if config.device == "cuda" else 0


def _start(runner: Runner, began: float, taken: int) -> Row:
    """Return an engine's time to start, and the memory that it took of the GPU beside what is predicted."""
    config = runner.config
    loads = device_loads(config, model_shards(config))
    predicted = sum(load.held + (config.num_pages or 0) * load.page for load in loads)
    graphs, graph_ms = (
        sum(int(value) for rank in runner.topology for name, value in rank.items() if name.endswith(end))
        for end in ("graph_bytes", "graph_ms")
    )
    return {
        "drafter": config.draft.tree.kind if config.draft else None,
        "seconds": time.perf_counter() - began,
        "predicted_gb": predicted / 1e9,
        "taken_gb": taken / 1e9 if config.device == "cuda" else None,
        "graphs_gb": graphs / 1e9,
        "graph_seconds": graph_ms / 1e3,
    }


def drafter_of(
    name: ContestantName, draft: DraftConfig, plan: SpeedPlan, small: Path | None = None
) -> DraftConfig | None:
    """Return a contestant's drafter. `dynamic` and `auto` share one, and differ in their request parameters."""
    match name:
        case "off":
            return None
        case "draft_model":
            return replace(
                draft, method="draft_model", model_path=str(small), tree=TreeConfig(num_speculative_tokens=plan.nodes)
            )
        case _:
            return replace(draft, tree=_tree(name, draft, plan))


def _tree(name: ContestantName, draft: DraftConfig, plan: SpeedPlan) -> TreeConfig:
    own = draft.tree
    match name:
        case "chain":
            return TreeConfig(kind="chain", num_speculative_tokens=plan.chain, max_depth=plan.chain)
        case "static":
            table = acceptance_table(CHAIN_ACCEPTANCE, STAR_ACCEPTANCE, max(STAR_ACCEPTANCE))
            paths = best_tree(plan.nodes, table)
            return TreeConfig(
                kind="static", num_speculative_tokens=len(paths), max_depth=len(paths[-1]), static_paths=paths
            )
        case _:
            return replace(own, kind="dynamic", num_speculative_tokens=plan.nodes, prune=PruneConfig(auto=True))


def _transformers(
    names: Sequence[ContestantName], config: EngineConfig, plan: SpeedPlan, small: Path | None
) -> Iterator[TransformersContestant]:
    """Make the transformers contestants, which share one copy of the target."""
    model = load_model(config.model_path, config.dtype, config.device)
    for name in names:
        alone = 1 if name in ALONE else None
        match name:
            case "generate":
                yield TransformersContestant(name, model, max_batch=alone)
            case "generate_2_threads" if config.device == "cpu":  # on a GPU it would equal `generate`
                yield TransformersContestant(name, model, threads=2, max_batch=alone)
            case "assisted":
                assert small is not None
                helper = assistant(load_model(small, config.dtype, config.device), plan.chain)
                yield TransformersContestant(name, model, max_batch=alone, assistant_model=helper)
            case "prompt_lookup":
                yield TransformersContestant(name, model, max_batch=alone, prompt_lookup_num_tokens=plan.chain)


# -- turns -----------------------------------------------------------------------------------------------------------


def _measure(
    contestants: Sequence[Contestant], plan: SpeedPlan, prompts: Sequence[list[int]]
) -> Iterator[tuple[SpeedRow, StepBreakdown | None]]:
    for contestant in contestants:
        contestant.take_turn(_jobs(prompts[:1], WARM_TOKENS, 0.0, plan.seed), 1)
    for temperature in plan.temperatures:
        for batch in plan.batches:
            turns = _turns(prompts, max(batch, plan.num_prompts), plan, temperature)
            present = [c for c in contestants if c.max_batch is None or batch <= c.max_batch]
            _round([c for c in present if not isinstance(c, TransformersContestant)], turns[0], batch)
            orders = (present, present[::-1])
            rounds = [_round(orders[i % 2], jobs, batch) for i, jobs in enumerate(turns)]
            for contestant in present:
                row, steps = row_of(contestant.name, temperature, batch, rounds)
                yield replace(row, bytes_per_weight=contestant.bytes_per_weight), steps
                say(f"T={temperature:g}, batch {batch}, {row.contestant}: {row.tpot_ms:.1f} ms per token")


def _first_tokens(contestants: Sequence[Contestant], plan: SpeedPlan) -> Iterator[Row]:
    """Time the first tokens of single requests with long prompts; the first round does not count."""
    random = np.random.default_rng(plan.seed)
    for length in plan.prompt_tokens:
        found: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
        for _ in range(1 + plan.rounds):
            jobs = _jobs([random.integers(4, 2048, length).tolist()], FIRST_TOKENS, 0.0, plan.seed)
            for name, turn in _round(contestants, jobs, 1).items():
                found[name].append(1e3 * turn.timings[0].first_seconds)
        for name, times in found.items():
            yield {"contestant": name, "prompt_tokens": length, "ttft_ms": statistics.median(times[1:])}


def _turns(prompts: Sequence[list[int]], size: int, plan: SpeedPlan, temperature: float) -> list[list[GenerationJob]]:
    """Return the jobs of each round. Each takes the next prompts, so that short turns still cover all prompts."""
    endless = cycle(prompts)
    return [_jobs(list(islice(endless, size)), plan.max_tokens, temperature, plan.seed) for _ in range(plan.rounds)]


def _jobs(prompts: Sequence[list[int]], max_tokens: int, temperature: float, seed: int) -> list[GenerationJob]:
    return [
        GenerationJob(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=SamplingSettings(temperature=temperature, seed=derive_seed(seed, i)),
        )
        for i, prompt in enumerate(prompts)
    ]


def _round(contestants: Sequence[Contestant], jobs: Sequence[GenerationJob], batch: int) -> dict[str, Turn]:
    return {contestant.name: contestant.take_turn(jobs, batch) for contestant in contestants}


def row_of(
    name: str, temperature: float, batch: int, rounds: Sequence[dict[str, Turn]]
) -> tuple[SpeedRow, StepBreakdown | None]:
    """Return a contestant's medians, and those of its steps if it is an engine of ours.

    rounds: the turns of all contestants, including "off".
    """
    chosen, off = [turns[name] for turns in rounds], [turns["off"] for turns in rounds]
    pairs, tpots = list(zip(chosen, off, strict=True)), list(map(_tpot, chosen))
    ratio = statistics.median(_tpot(plain) / _tpot(turn) for turn, plain in pairs)
    same = [
        timing.tokens == plain_timing.tokens
        for turn, plain in pairs
        for timing, plain_timing in zip(turn.timings, plain.timings, strict=True)
    ]
    lengths = [turn.acceptance_length for turn in chosen if turn.acceptance_length is not None]
    row = SpeedRow(
        contestant=name,
        temperature=temperature,
        batch=batch,
        ttft_ms=1e3 * statistics.median(t.first_seconds for turn in chosen for t in turn.timings),
        tpot_ms=1e3 * statistics.median(tpots),
        tpot_spread=(max(tpots) - min(tpots)) / statistics.median(tpots),
        tpot_ratio=ratio,
        tokens_per_second=statistics.median(turn.tokens_per_second for turn in chosen),
        throughput_ratio=statistics.median(t.tokens_per_second / p.tokens_per_second for t, p in pairs),
        same_tokens=statistics.mean(same),
        acceptance_length=statistics.median(lengths) if lengths else None,
    )
    steps = median_steps([turn.steps for turn in chosen if turn.steps is not None])
    plain = median_steps([turn.steps for turn in off if turn.steps is not None])
    if steps is None or plain is None:
        return row, None
    ceiling = steps.tokens_per_step * plain.forward_ms / (steps.forward_ms + steps.draft_ms)
    gain = steps.tokens_per_step * plain.total_ms / steps.total_ms
    is_off = name == "off"
    row = replace(
        row,
        acceptance_length=None if is_off else steps.acceptance_length,
        tokens_per_step=steps.tokens_per_step,
        verified_per_step=steps.verified_per_step,
        step_gain=gain,
        ceiling=None if is_off else ceiling,
        ceiling_share=None if is_off else gain / ceiling,
    )
    return row, steps


def _tpot(turn: Turn) -> float:
    return statistics.mean(timing.seconds_per_token for timing in turn.timings)


def bytes_per_weight(config: EngineConfig) -> float:
    """Return the mean size of a weight of the target as our engine keeps it, which each step reads."""
    dtype = getattr(torch, config.dtype)
    weights = Weights(config.model_path, dtype)
    sizes = {name: math.prod(weights.shape(name)) for name in weights.names() if len(weights.shape(name)) == 2}
    if config.device != "cpu":
        kept = sizes_in_bits(config, config.model_path, read_spec(config.model_path), config.tensor_parallel_size)
        return sum(size * kept.get(name, dtype.itemsize) for name, size in sizes.items()) / sum(sizes.values())
    return sum(size * linear.bytes_per_weight(weights.get(name)) for name, size in sizes.items()) / sum(sizes.values())


if __name__ == "__main__":
    small = {"contestants": ("off", "dynamic", "auto", "generate", "assisted"), "temperatures": (0.0,), "rounds": 2}
    main(SpeedPlan, measure, {**small, "batches": (1, 2), "num_prompts": 2, "max_tokens": 16})
