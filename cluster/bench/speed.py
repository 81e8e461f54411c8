"""`secateur bench latency` and `throughput`: one measurement with two reports.

All contestants stay loaded and take turns, so that other load on the machine affects them alike. Every round uses the
next prompts and reverses the order of contestants. Results are medians over the rounds, also of the ratios.

A contestant's ceiling is its speedup over our engine without speculation if only the two models took time: tokens per
step x V(1) / (V(N+1) + D), where V is the forward of the target and D is drafting.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from cluster.bench.contestants import (
    Contestant,
    SecateurContestant,
    TransformersContestant,
    Turn,
    assistant,
    load_model,
    median_steps,
)
from cluster.bench.output import Say, about, device_mark, draw, rounded, stem_of, write_json, write_text
from cluster.bench.peers import NOTES as PEER_NOTES
from cluster.bench.peers import launches, started, version_of
from cluster.bench.runner import GenerationJob, Runner
from cluster.bench.sequoia import acceptance_table, best_tree
from cluster.bench.setup import bytes_per_weight, scaled, workload
from cluster.bench.speed_report import SpeedRow, render
from cluster.convert import model_folder
from cluster.http.request_params import derive_seed
from secateur.bench import ALONE, PEERS, TRANSFORMERS, ContestantName, SpeedPlan
from secateur.config import BUNDLED_TARGET, EngineArgs
from secateur.prompts import BenchPrompt
from workers.comm.ipc import Speculation
from workers.config import DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.gc_freeze import freeze_start_up
from workers.settings import SamplingSettings

CHAIN_ACCEPTANCE = (0.78, 0.77, 0.77, 0.77, 0.75, 0.75, 0.72, 0.7)
STAR_ACCEPTANCE = {1: 0.78, 2: 0.89, 4: 0.95, 8: 0.98}
"""Acceptance of the bundled pair at temperature 0, measured with `secateur bench acceptance`.

The chain is the first child's by depth, the star that of any of the first k children. Sequoia's tree for these is the
static contestant.
"""

WARM_TOKENS = 8
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
    "gain in decoding: by steps in which all requests decode, no prompt is computed and none has finished; ceiling: "
    "tokens/step x V(1) / (V(N+1) + D), from the same steps; share: of the ceiling that they reach",
    "same: requests whose tokens are those without speculation; transformers draws other noise at T > 0",
)


def run(
    args: EngineArgs,
    plan: SpeedPlan,
    prompts: Sequence[BenchPrompt],
    output: Path,
    say: Say,
    *,
    name: str,
    as_json: bool = False,
    cache: Path | None = None,
    peers: Path = Path(".peers"),
) -> str:
    """Measure, write DATE-name.json, .md and .png, and return the Markdown, or the JSON.

    If the run is interrupted, the JSON keeps the rows so far. Raises ConfigError before anything is started, EngineDead
    and PeerFailed.
    """
    with scaled(args, plan.size, cache, say) as args_:
        config, tokens = workload(args_, prompts, max_tokens=plan.max_tokens, max_num_seqs=max(plan.batches))
        launched = launches([c for c in plan.contestants if c in PEERS], args_, config, plan, peers)
        stem = stem_of(output, name, plan.target_cost, device_mark(config))
        versions = {launch.peer: version_of(launch) for launch in launched}
        settings = plan.model_dump() | ({"peers": versions} if versions else {"peer_threads": None})
        head = about(args, config, settings, NOTES + PEER_NOTES if versions else NOTES)
        rows: list[SpeedRow] = []
        try:
            with (
                _contestants(config, plan, _assistant_folder(args), say) as contestants,
                started(launched, say) as others,
            ):
                for row in _measure([*contestants, *others], plan, tokens, say):
                    rows.append(row)
        finally:
            write_json(stem, head, {"rows": [asdict(row) for row in rows]})
    text = render(name, head, rows)
    shown = write_text(stem, text, as_json=as_json)
    draw(say, stem, "speed", rows)
    return shown


def _assistant_folder(args: EngineArgs) -> Path | None:
    """Return the small model for assisted generation and our draft model, or None if the target has none."""
    spec = args.speculative_config
    if spec is not None and spec.method == "draft_model" and spec.model is not None:
        return model_folder(spec.model)
    return model_folder("bundled:draft") if args.model == BUNDLED_TARGET else None


# -- contestants ----------------------------------------------------------------------------------------------------


@contextmanager
def _contestants(config: EngineConfig, plan: SpeedPlan, small: Path | None, say: Say) -> Iterator[list[Contestant]]:
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
            drafter = drafter_of(name, config.draft, plan, small)
            if drafter not in engines:
                say(f"starting {name}")
                engines[drafter] = stack.enter_context(Runner(replace(config, draft=drafter)))
            found.append(
                SecateurContestant(
                    name=name,
                    runner=engines[drafter],
                    bytes_per_weight=weight_bytes,
                    speculation=Speculation(auto=name == "auto"),
                )
            )
        if modes := [name for name in names if name in TRANSFORMERS]:
            say(f"loading {', '.join(modes)}")
            found += _transformers(modes, config, plan, small)
            freeze_start_up()  # as our processes do
        yield found


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
    contestants: Sequence[Contestant], plan: SpeedPlan, prompts: Sequence[list[int]], say: Say
) -> Iterator[SpeedRow]:
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
                row = row_of(contestant.name, temperature, batch, rounds)
                row = replace(row, bytes_per_weight=rounded(contestant.bytes_per_weight))
                yield row  # what is told is kept, even if the run is interrupted
                say(f"T={temperature:g}, batch {batch}, {row.contestant}: {row.tpot_ms:.1f} ms per token")


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


def row_of(name: str, temperature: float, batch: int, rounds: Sequence[dict[str, Turn]]) -> SpeedRow:
    """Return a contestant's medians; `rounds` hold the turns of all contestants, including "off"."""
    chosen, off = [turns[name] for turns in rounds], [turns["off"] for turns in rounds]
    pairs = list(zip(chosen, off, strict=True))
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
        ttft_ms=rounded(1e3 * statistics.median(t.first_seconds for turn in chosen for t in turn.timings)),
        tpot_ms=rounded(1e3 * statistics.median(map(_tpot, chosen))),
        tpot_ratio=rounded(ratio),
        tokens_per_second=rounded(statistics.median(turn.tokens_per_second for turn in chosen)),
        throughput_ratio=rounded(statistics.median(t.tokens_per_second / p.tokens_per_second for t, p in pairs)),
        same_tokens=rounded(statistics.mean(same)),
        acceptance_length=rounded(statistics.median(lengths)) if lengths else None,
    )
    steps = median_steps([turn.steps for turn in chosen if turn.steps is not None])
    plain = median_steps([turn.steps for turn in off if turn.steps is not None])
    if steps is None or plain is None:
        return row
    ceiling = steps.tokens_per_step * plain.forward_ms / (steps.forward_ms + steps.draft_ms)
    gain = steps.tokens_per_step * plain.total_ms / steps.total_ms
    parts: dict[str, Any] = {key: rounded(value) for key, value in asdict(steps).items() if key != "num_steps"}
    return replace(
        row,
        **parts,
        step_ms=rounded(steps.total_ms),
        outside_models=rounded(steps.outside_models),
        step_gain=rounded(gain),
        ceiling=rounded(ceiling) if name != "off" else None,
        ceiling_share=rounded(gain / ceiling) if name != "off" else None,
    )


def _tpot(turn: Turn) -> float:
    return statistics.mean(timing.seconds_per_token for timing in turn.timings)
