"""`secateur bench acceptance`: acceptance by temperature, tree, acceptance rule, node budget and pruning.

Every cell answers the same prompts with the same seeds. Budget, temperature, rule and pruning are request parameters,
so one engine serves all cells of a kind of tree. Only each static tree needs a new engine. The order is:

    chain    also measures acceptance by depth
    star     a root and its children: measures acceptance by child rank
    static   Sequoia's tree for each cell, computed from these two
    dynamic  without pruning, then with thresholds, then `auto`
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cluster.bench.acceptance_report import render
from cluster.bench.acceptance_rows import ACCEPTANCES, Acceptance, AcceptanceCell, AcceptanceRow, PruningSetting, row_of
from cluster.bench.output import About, Say, about, draw, stem_of, write_text
from cluster.bench.prompts import encode_prompts
from cluster.bench.runner import GeneratedAnswer, GenerationJob, Runner
from cluster.bench.sequoia import NodePath, acceptance_table, best_tree, expected_accepted
from cluster.convert import engine_config, fetch_weights, load_tokenizer, visible_gpus
from cluster.http.request_params import derive_seed
from secateur.bench import AcceptancePlan
from secateur.config import EngineArgs
from secateur.errors import ConfigError, Problem
from secateur.prompts import BenchPrompt
from workers.config import EngineConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.settings import SamplingSettings

PRUNINGS = (
    *(PruningSetting(prune="thresholds", min_prob=value) for value in (0.05, 0.1, 0.2, 0.4)),
    *(PruningSetting(prune="thresholds", path_prob=value) for value in (0.02, 0.05, 0.1, 0.2)),
    PruningSetting(prune="auto"),
)
STEP_MS = 20.0
PRUNED_TEMPERATURES = (0.0, 1.0)
SAME_TREE = 0.98
"""A cell reuses another cell's static tree if that is expected to accept this share of what its own tree would.

The measured rates are no more precise than that, and every tree costs an engine start.
"""
SMOOTHING = 8
"""Pseudo-trials that shrink the acceptance rate of a depth towards that of the depth above: deep samples are few."""

Regime = tuple[Acceptance, float]


def run(
    args: EngineArgs,
    plan: AcceptancePlan,
    prompts: Sequence[BenchPrompt],
    output: Path,
    say: Say,
    *,
    as_json: bool = False,
) -> str:
    """Measure the table, write DATE-acceptance.json, .md and two .png, and return the Markdown, or the JSON.

    If an engine dies, or on Ctrl-C, the JSON holds the rows measured so far. Raises ConfigError before anything is
    started, and EngineDead.
    """
    config = _engine(args, plan)
    tokens = encode_prompts(load_tokenizer(args, config), prompts)
    longest, limit = max(map(len, tokens)), config.max_model_len
    if longest + plan.max_tokens > limit:
        asked = f"{plan.max_tokens} with a prompt of {longest} tokens"
        raise ConfigError(Problem("--max-tokens", f"{asked} exceeds max_model_len={limit}; ask for less"))
    fetch_weights(args, config)
    stem = stem_of(output, "acceptance")
    table = _AcceptanceSweep(config, plan, tokens, say)
    rows: list[AcceptanceRow] = []
    try:
        for row in table.rows():
            rows.append(row)
    finally:
        if rows:
            stem.with_suffix(".json").write_text(_json(rows))
        else:
            stem.with_suffix(".json").unlink()
    text = render(_header(args, config, plan), rows)
    shown = write_text(stem, text, as_json=as_json)
    draw(say, stem, "acceptance", rows)
    return shown


def _engine(args: EngineArgs, plan: AcceptancePlan) -> EngineConfig:
    """Return the engine's configuration, no larger than the benchmark needs."""
    config = engine_config(args, num_gpus=visible_gpus())
    return replace(config, max_num_seqs=min(config.max_num_seqs, plan.concurrency))


@dataclass(frozen=True, slots=True)
class _Measured:
    answers: list[GeneratedAnswer]
    seconds: float


class _AcceptanceSweep:
    """Measures one cell after the other."""

    def __init__(self, config: EngineConfig, plan: AcceptancePlan, prompts: list[list[int]], say: Say) -> None:
        assert config.draft is not None
        self._config, self._draft, self._plan, self._say = config, config.draft, plan, say
        self._prompts = prompts
        self._depth = config.draft.tree.max_depth
        self._regimes: list[Regime] = [(rule, t) for t in plan.temperatures for rule in ACCEPTANCES]
        self._chain_D: dict[Regime, list[float]] = {}  # acceptance of the first child by depth

    def rows(self) -> Iterator[AcceptanceRow]:
        """Measure and yield all rows."""
        yield from self._chains()
        yield from self._statics()
        yield from self._dynamics()

    def _chains(self) -> Iterator[AcceptanceRow]:
        """Measure full-depth chains, and chains with the same budget and depth cap as the dynamic trees."""
        capped = {num: min(num, self._depth) for num in self._plan.nodes}
        deepest = max(capped.values())
        sizes = sorted({*self._plan.nodes, *capped.values()})
        with self._running(TreeConfig(kind="chain", num_speculative_tokens=max(sizes), max_depth=max(sizes))) as runner:
            for rule, temperature in self._regimes:
                measured = {}
                for size in sizes:
                    cell = AcceptanceCell(tree="chain", acceptance=rule, num_nodes=size, temperature=temperature)
                    measured[size] = (cell, self._measure(runner, cell))
                self._chain_D[rule, temperature] = _acceptance_by_depth(measured[deepest][1].answers, deepest)
                for budget in self._plan.nodes:
                    # One row if the budget is within the depth cap; else the full chain and the capped one.
                    for size, cap in {budget: max(budget, self._depth), capped[budget]: self._depth}.items():
                        cell, result = measured[size]
                        yield self._row(cell, result, budget=budget, max_depth=cap)

    def _statics(self) -> Iterator[AcceptanceRow]:
        star = self._stars()
        trees: dict[tuple[NodePath, ...], list[Regime]] = {}
        for num in self._plan.nodes:
            for regime in self._regimes:
                accept_DK = acceptance_table(self._chain_D[regime], star[regime], self._draft.tree.max_children)
                best = best_tree(num, accept_DK)
                enough = SAME_TREE * expected_accepted(best, accept_DK)
                usable = (t for t in trees if len(t) == num and expected_accepted(t, accept_DK) >= enough)
                trees.setdefault(next(usable, best), []).append(regime)
        for paths, regimes in trees.items():
            tree = TreeConfig(
                kind="static", num_speculative_tokens=len(paths), max_depth=len(paths[-1]), static_paths=paths
            )
            with self._running(tree) as runner:
                for rule, temperature in regimes:
                    cell = AcceptanceCell(tree="static", acceptance=rule, num_nodes=len(paths), temperature=temperature)
                    yield self._row(cell, self._measure(runner, cell), static_tree=str(list(paths)))

    def _stars(self) -> dict[Regime, dict[int, float]]:
        """Measure how often one of a root's first k children is accepted, with shorter runs than a cell's."""
        most = self._draft.tree.max_children
        widths = sorted({width for width in (1, 2, 4, 8, 16, 32) if width < most} | {most})
        star = TreeConfig(
            kind="static", num_speculative_tokens=most, max_depth=1, static_paths=tuple((k,) for k in range(most))
        )
        found: dict[Regime, dict[int, float]] = {}
        with self._running(star) as runner:
            for rule, temperature in self._regimes:
                cells = [
                    AcceptanceCell(tree="static", acceptance=rule, num_nodes=width, temperature=temperature)
                    for width in widths
                ]
                found[rule, temperature] = {
                    cell.num_nodes: _acceptance_by_depth(self._measure(runner, cell, share=0.5).answers, 1)[0]
                    for cell in cells
                }
        return found

    def _dynamics(self) -> Iterator[AcceptanceRow]:
        plan = self._plan
        tree = replace(
            self._draft.tree, kind="dynamic", num_speculative_tokens=max(plan.nodes), prune=PruneConfig(auto=True)
        )
        cells = [
            AcceptanceCell(tree="dynamic", acceptance=rule, num_nodes=num, temperature=temperature)
            for rule, temperature in self._regimes
            for num in plan.nodes
        ]
        pruned = [t for t in plan.temperatures if t in PRUNED_TEMPERATURES] or list(plan.temperatures[:1])
        cells += [
            AcceptanceCell(tree="dynamic", acceptance=rule, num_nodes=num, temperature=temperature, pruning=pruning)
            for pruning in PRUNINGS
            for temperature in pruned
            for rule in ("coupled", "rejection")
            for num in sorted(plan.nodes)[-2:]
        ]
        with self._running(tree) as runner:
            for cell in cells:
                yield self._row(cell, self._measure(runner, cell))
        for price in plan.row_prices:
            # As if each request ran alone.
            costs = SimulatedCosts(step_ms=STEP_MS, row_ms=price * STEP_MS / plan.concurrency)
            # Without prompt lookup, whose drafts would be credited to pruning.
            prune = PruneConfig(auto=True, prompt_lookup=False, simulated_costs=costs)
            with self._running(replace(tree, prune=prune)) as runner:
                for cell in cells:
                    if cell.pruning.prune == "auto":
                        priced = replace(cell, pruning=replace(cell.pruning, row_price=price))
                        yield self._row(priced, self._measure(runner, priced))

    def _row(
        self,
        cell: AcceptanceCell,
        measured: _Measured,
        *,
        budget: int | None = None,
        max_depth: int | None = None,
        static_tree: str | None = None,
    ) -> AcceptanceRow:
        return row_of(
            cell,
            measured.answers,
            measured.seconds,
            method=self._draft.method,
            budget=budget or cell.num_nodes,
            max_depth=max_depth or self._depth,
            static_tree=static_tree,
        )

    @contextmanager
    def _running(self, tree: TreeConfig) -> Iterator[Runner]:
        """Start an engine with these trees and warm it up."""
        self._say(f"starting an engine for {tree.kind} trees of {tree.num_speculative_tokens} nodes")
        with Runner(replace(self._config, draft=replace(self._draft, tree=tree))) as runner:
            runner.run([GenerationJob(prompt=prompt, max_tokens=8) for prompt in self._prompts], self._plan.concurrency)
            yield runner

    def _measure(self, runner: Runner, cell: AcceptanceCell, share: float = 1.0) -> _Measured:
        """Run all prompts with this share of the tokens per answer."""
        max_tokens = max(2, round(share * self._plan.max_tokens))
        jobs = [
            GenerationJob(
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=SamplingSettings(temperature=cell.temperature, seed=derive_seed(self._plan.seed, i)),
                speculation=cell.speculation,
            )
            for i, prompt in enumerate(self._prompts)
        ]
        began = time.perf_counter()
        answers = runner.run(jobs, self._plan.concurrency)
        seconds = time.perf_counter() - began
        self._say(f"{cell}: {seconds:.1f} s")
        return _Measured(answers, seconds)


def _acceptance_by_depth(answers: Sequence[GeneratedAnswer], max_depth: int) -> list[float]:
    """Return [D] the rate at which a node is accepted if its parent was, shrunk towards the depth above."""
    reached = float(sum(answer.stats.num_drafts for answer in answers))
    rates: list[float] = []
    for depth in range(max_depth):
        accepted = sum(
            answer.stats.accepted_per_depth[depth] for answer in answers if depth < len(answer.stats.accepted_per_depth)
        )
        before, weight = (rates[-1], SMOOTHING) if rates else (0.0, 0)
        rates.append((accepted + weight * before) / max(reached + weight, 1.0))
        reached = accepted
    return rates


def _header(args: EngineArgs, config: EngineConfig, plan: AcceptancePlan) -> About:
    assert config.draft is not None
    notes = (
        f"tokens_per_second is as measured with {plan.concurrency} requests in flight; prompts are in the prefix cache",
        "acceptance none is rejection with enable_draft_probs false: the most likely children, target-only",
        "a chain is cut at max_depth, as the dynamic tree is; one with a larger max_depth is in full depth",
        "a static tree is Sequoia's for its cell's measured acceptance, or one expected to accept 98 % of that",
    )
    tree = config.draft.tree
    settings = {"max_depth": tree.max_depth, "max_children": tree.max_children, **plan.model_dump()}
    return about(args, config, settings, notes)


def _json(rows: Sequence[AcceptanceRow]) -> str:
    """Format one row per line, so that two runs are easy to compare."""
    return "[\n " + ",\n ".join(json.dumps(asdict(row)) for row in rows) + "\n]\n"
