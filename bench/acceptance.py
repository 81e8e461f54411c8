"""Acceptance by temperature, tree, acceptance rule, node budget and pruning: python -m bench.acceptance.

Every cell answers the same prompts with the same seeds. Budget, temperature, rule and pruning are request parameters,
so one engine serves all cells of a kind of tree. Only each static tree needs a new engine. The order is:

    chain    also measures acceptance by depth
    star     a root and its children: measures acceptance by child rank
    static   Sequoia's tree for each cell, computed from these two
    dynamic  without pruning, then with thresholds, then `auto`

Three tables follow from the rows. `draft probabilities`: acceptance length under coupled or rejection, the better,
over that without. `dynamic minus others`: acceptance length of the dynamic tree minus that of its own chain (same
budget, cut at the same depth) and of the static tree of its size, paired by prompt. `pruning`: nodes verified per token
saved, and tokens per step kept, against the static tree of the same budget.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from bench.harness import BenchmarkPlan, Run, main, scaled
from bench.sequoia import NodePath, acceptance_table, best_tree, expected_accepted
from cluster.bench.report import Report, Row
from cluster.bench.runner import GeneratedAnswer, GenerationJob, Runner
from cluster.bench.setup import encode_prompts
from cluster.convert import engine_config, fetch_weights, load_tokenizer, visible_gpus
from cluster.openai.request_params import derive_seed
from secateur.bench import PositiveInt, Some, Temperature, check_drafter
from secateur.cli.bench import say
from secateur.errors import ConfigError, Problem
from secateur.prompts import read_prompts
from secateur.token_tree import MAX_NODES
from workers.comm.ipc import Speculation
from workers.config import EngineConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.settings import SamplingSettings

NOTES = (
    "tokens_per_second is as measured with `concurrency` requests in flight; prompts are in the prefix cache",
    "acceptance none is rejection with enable_draft_probs false: the most likely children, target-only",
    "a chain is cut at max_depth, as the dynamic tree is; one with a larger max_depth is in full depth",
    "a static tree is Sequoia's for its cell's measured acceptance, or one expected to accept 98 % of that",
)
Tree = Literal["chain", "static", "dynamic"]
Acceptance = Literal["coupled", "rejection", "none"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "rejection", "none")


STEP_MS = 20.0
PRUNED_TEMPERATURES = (0.0, 1.0)
SAME_TREE = 0.98
"""A cell reuses another cell's static tree if that is expected to accept this share of what its own tree would.

The measured rates are no more precise than that, and every tree costs an engine start.
"""
SMOOTHING = 8
"""Pseudo-trials that shrink the acceptance rate of a depth towards that of the depth above: deep samples are few."""


class AcceptancePlan(BenchmarkPlan):
    """The cells of the acceptance table, and the requests that each cell runs."""

    temperatures: Some[Temperature] = (
        *(0.0, 0.3, 0.5, 0.7),
        *(1.0, 1.3, 1.5, 2.0),
    )
    nodes: Some[Annotated[int, Field(ge=1, le=MAX_NODES)]] = (4, 8, 16, 32)
    """Tree nodes per step, without the root."""
    num_prompts: PositiveInt = 24
    max_tokens: Annotated[int, Field(ge=2)] = 32
    """Tokens per answer; end-of-sequence tokens are ignored."""
    concurrency: PositiveInt = 8
    seed: Annotated[int, Field(ge=0)] = 0
    """Answer i of every cell uses the seed H(seed, i)."""
    row_prices: tuple[Annotated[float, Field(gt=0.0)], ...] = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)
    """Simulated verify costs for `auto`, independent of the machine: the share of a step that one verified row costs,
    if drafting is free and all requests in flight share the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningSetting:
    """How a cell prunes its trees; by default it does not."""

    prune: Literal["off", "thresholds", "auto"] = "off"
    min_prob: float = 0.0
    path_prob: float = 0.0
    row_price: float | None = None
    """Cost of a verified row as a share of a step, for `auto` with given costs. None = measured costs."""

    def __str__(self) -> str:
        if self.row_price is not None:
            return f"auto at {self.row_price:g} a row"
        if self.prune != "thresholds":
            return self.prune
        return f"min_prob {self.min_prob:g}" if self.min_prob else f"path_prob {self.path_prob:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCell:
    """The settings of one row.

    Example: AcceptanceCell(tree="dynamic", acceptance="coupled", num_nodes=16, temperature=1.0)
    """

    tree: Tree
    acceptance: Acceptance
    num_nodes: int
    temperature: float
    pruning: PruningSetting = PruningSetting()

    @property
    def speculation(self) -> Speculation:
        """The request parameters. `none` is rejection without draft probabilities: top-k children, target only."""
        return Speculation(
            num_speculative_tokens=self.num_nodes,
            auto=self.pruning.prune == "auto",
            acceptance="coupled" if self.acceptance == "coupled" else "rejection",
            draft_probs=self.acceptance == "rejection",
            rules={"min_prob": self.pruning.min_prob, "path_prob": self.pruning.path_prob},
        )

    def __str__(self) -> str:
        pruned = "" if self.pruning.prune == "off" else f", {self.pruning}"
        return f"{self.tree} of {self.num_nodes}, {self.acceptance}, T={self.temperature:g}{pruned}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRow:
    """One row of the table. Counts per token cover all generated tokens; acceptance covers steps with a draft."""

    method: str
    tree: Tree
    acceptance: Acceptance
    num_speculative_tokens: int
    """The budget of draft nodes per step."""
    temperature: float
    max_depth: int
    """The depth cap, also of chains."""
    num_nodes: int
    """Nodes of the largest tree within budget and cap."""
    static_tree: str | None
    prune: Literal["off", "thresholds", "auto"]
    prune_min_prob: float
    prune_path_prob: float
    prune_row_price: float | None
    """See `PruningSetting`."""
    acceptance_length: float
    """1 + accepted / drafts over all prompts: tokens per step with at least one draft node."""
    acceptance_length_se: float | None
    """Standard error of the mean over prompts; None with a single one."""
    acceptance_lengths: list[float]
    """The same for each prompt, in the same order in all rows."""
    tokens_per_step: float
    """Over all decoding steps, including those that pruning left without a draft."""
    verified_per_token: float
    drafted_per_token: float
    tokens_per_second: float
    num_prompts: int
    num_tokens: int

    @property
    def pruning(self) -> PruningSetting:
        """How the row's trees were pruned."""
        return PruningSetting(
            prune=self.prune,
            min_prob=self.prune_min_prob,
            path_prob=self.prune_path_prob,
            row_price=self.prune_row_price,
        )


def row_of(
    cell: AcceptanceCell,
    answers: Sequence[GeneratedAnswer],
    seconds: float,
    *,
    method: str,
    budget: int,
    max_depth: int,
    static_tree: str | None = None,
) -> AcceptanceRow:
    """Make the row of a cell that took `seconds`. budget: the node budget the row is listed under."""
    num_tokens = sum(len(answer.tokens) for answer in answers)
    lengths = [acceptance_length([answer]) for answer in answers]
    return AcceptanceRow(
        method=method,
        tree=cell.tree,
        acceptance=cell.acceptance,
        num_speculative_tokens=budget,
        temperature=cell.temperature,
        max_depth=max_depth,
        num_nodes=cell.num_nodes,
        static_tree=static_tree,
        prune=cell.pruning.prune,
        prune_min_prob=cell.pruning.min_prob,
        prune_path_prob=cell.pruning.path_prob,
        prune_row_price=cell.pruning.row_price,
        acceptance_length=round(acceptance_length(answers), 4),
        acceptance_length_se=round(standard_error(lengths), 4) if len(lengths) > 1 else None,
        acceptance_lengths=[round(length, 4) for length in lengths],
        tokens_per_step=round((num_tokens - len(answers)) / max(1, sum(answer.num_steps for answer in answers)), 4),
        verified_per_token=round(sum(answer.stats.num_verified_tokens for answer in answers) / num_tokens, 4),
        drafted_per_token=round(sum(answer.stats.num_draft_tokens for answer in answers) / num_tokens, 4),
        tokens_per_second=round(num_tokens / seconds, 1),
        num_prompts=len(answers),
        num_tokens=num_tokens,
    )


def acceptance_length(answers: Sequence[GeneratedAnswer]) -> float:
    """Return 1 + accepted / drafts, or 1 if nothing was drafted."""
    drafts = sum(answer.stats.num_drafts for answer in answers)
    return 1 + sum(answer.stats.num_accepted_tokens for answer in answers) / max(1, drafts)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of two or more values."""
    return statistics.stdev(values) / len(values) ** 0.5


PRUNINGS = (
    *(PruningSetting(prune="thresholds", min_prob=value) for value in (0.05, 0.1, 0.2, 0.4)),
    *(PruningSetting(prune="thresholds", path_prob=value) for value in (0.02, 0.05, 0.1, 0.2)),
    PruningSetting(prune="auto"),
)

Regime = tuple[Acceptance, float]


def measure(run: Run) -> Report:
    """Measure the table. Raises ConfigError before anything is started, and EngineDead."""
    args, plan = run.args, run.plan
    check_drafter(args, max(plan.nodes))
    texts = read_prompts(run.prompts, plan.num_prompts)
    if len(texts) < plan.num_prompts:
        has = f"{run.prompts} has {len(texts)} prompts"
        raise ConfigError(Problem("--num-prompts", f"{has}; ask for at most that many, not {plan.num_prompts}"))
    with scaled(args, plan.target_cost, plan.cache, say) as sized:
        config = engine_config(sized, num_gpus=visible_gpus())
        config = replace(config, max_num_seqs=min(config.max_num_seqs, plan.concurrency))
        tokens = encode_prompts(load_tokenizer(sized, config), texts)
        longest, limit = max(map(len, tokens)), config.max_model_len
        if longest + plan.max_tokens > limit:
            asked = f"{plan.max_tokens} with a prompt of {longest} tokens"
            raise ConfigError(Problem("--max-tokens", f"{asked} exceeds max_model_len={limit}; ask for less"))
        fetch_weights(sized, config)
        assert config.draft is not None
        tree = config.draft.tree
        with run.report(
            "acceptance", config, NOTES, max_depth=tree.max_depth, max_children=tree.max_children
        ) as report:
            rows = []
            for row in AcceptanceSweep(config, plan, tokens).rows():
                report.add("rows", row)
                rows.append(row)
            for table, line in conclusions(rows):
                report.add(table, line)
    return report


@dataclass(frozen=True, slots=True)
class _Measured:
    answers: list[GeneratedAnswer]
    seconds: float


class AcceptanceSweep:
    """Measures one cell after the other."""

    def __init__(self, config: EngineConfig, plan: AcceptancePlan, prompts: list[list[int]]) -> None:
        assert config.draft is not None
        self._config, self._draft, self._plan = config, config.draft, plan
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
        say(f"starting an engine for {tree.kind} trees of {tree.num_speculative_tokens} nodes")
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
        say(f"{cell}: {seconds:.1f} s")
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


# -- what follows from the rows


class RowKey(NamedTuple):
    """Identifies an unpruned row. is_full: a chain deeper than the depth cap of the dynamic trees."""

    tree: Tree
    acceptance: Acceptance
    num_nodes: int
    temperature: float
    is_full: bool = False


class Difference(NamedTuple):
    """Difference of two rows' acceptance lengths, paired by prompt."""

    mean: float
    error: float

    @property
    def sign(self) -> int:
        """1 or -1 if the difference exceeds two standard errors, else 0."""
        return (self.mean > 2 * self.error) - (self.mean < -2 * self.error)


class AcceptanceResults:
    """Rows with an index over the unpruned ones."""

    def __init__(self, rows: Sequence[AcceptanceRow]) -> None:
        self.rows = rows
        unpruned = [row for row in rows if row.prune == "off"]
        cap = min((row.max_depth for row in unpruned), default=0)
        self.by_key = {
            RowKey(row.tree, row.acceptance, row.num_speculative_tokens, row.temperature, row.max_depth > cap): row
            for row in unpruned
        }
        self.temperatures = sorted({row.temperature for row in rows})
        self.nodes = sorted({row.num_speculative_tokens for row in rows})
        self.cells = [(t, n) for t in self.temperatures for n in self.nodes]

    def gain(self, tree: Tree, temperature: float, num_nodes: int) -> float | None:
        """Return the ratio of acceptance lengths with (by the better rule) and without draft probabilities."""
        coupled, rejection, none = (
            self.by_key.get(RowKey(tree, acceptance, num_nodes, temperature)) for acceptance in ACCEPTANCES
        )
        if not (coupled and rejection and none):
            return None
        return max(coupled.acceptance_length, rejection.acceptance_length) / none.acceptance_length

    def ahead(self, other: Tree, acceptance: Acceptance, temperature: float, num_nodes: int) -> Difference | None:
        """Return the dynamic tree's acceptance length minus another tree's at the same budget and depth cap."""
        dynamic = self.by_key.get(RowKey("dynamic", acceptance, num_nodes, temperature))
        compared = self.by_key.get(RowKey(other, acceptance, num_nodes, temperature))
        if not (dynamic and compared) or dynamic.num_prompts < 2:
            return None
        pairs = zip(dynamic.acceptance_lengths, compared.acceptance_lengths, strict=True)
        differences = [a - b for a, b in pairs]
        return Difference(statistics.mean(differences), standard_error(differences))


def conclusions(rows: Sequence[AcceptanceRow]) -> Iterator[tuple[str, Row]]:
    """Return what follows from the rows, as rows of further tables; see the module."""
    results = AcceptanceResults(rows)
    trees: tuple[Tree, ...] = ("chain", "static", "dynamic")
    for tree in trees:
        for temperature, nodes in results.cells:
            if (gain := results.gain(tree, temperature, nodes)) is not None:
                yield "draft probabilities", {"tree": tree, "temperature": temperature, "nodes": nodes, "gain": gain}
    for other in trees[:2]:
        for rule in ACCEPTANCES:
            for temperature, nodes in results.cells:
                if (gap := results.ahead(other, rule, temperature, nodes)) is not None:
                    is_ahead = {1: "ahead", -1: "behind", 0: "even"}[gap.sign]
                    key = {"other": other, "acceptance": rule, "temperature": temperature, "nodes": nodes}
                    yield "dynamic minus others", {**key, **gap._asdict(), "verdict": is_ahead}
    for line in _pruning(results):
        yield "pruning", line


def _pruning(results: AcceptanceResults) -> Iterator[Row]:
    pruned = [row for row in results.rows if row.prune != "off"]
    for acceptance, t, n in dict.fromkeys((r.acceptance, r.temperature, r.num_speculative_tokens) for r in pruned):
        key = RowKey("static", acceptance, n, t)
        if (static := results.by_key.get(key)) is None:
            continue
        for row in (results.by_key.get(key._replace(tree="dynamic")), *(row for row in pruned if _is_of(row, key))):
            if row is not None:
                yield {
                    "acceptance": acceptance,
                    "temperature": t,
                    "nodes": n,
                    "pruning": str(row.pruning),
                    "saved": 1 - row.verified_per_token / static.verified_per_token,
                    "kept": row.tokens_per_step / static.tokens_per_step,
                }


def _is_of(row: AcceptanceRow, key: RowKey) -> bool:
    return (row.acceptance, row.num_speculative_tokens, row.temperature) == key[1:4]


if __name__ == "__main__":
    small = {"num_prompts": 4, "max_tokens": 24, "concurrency": 4}
    main(AcceptancePlan, measure, {"temperatures": (0.0, 1.0), "nodes": (12,), "row_prices": (0.03,), **small})
