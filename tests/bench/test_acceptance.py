"""`bench.acceptance`: Sequoia's trees against exhaustive search, the report of known rows, and a quick run."""

from __future__ import annotations

import json
import random
import sys
from unittest import mock

import pytest

from bench import harness
from bench.acceptance import ACCEPTANCES, AcceptancePlan, AcceptanceResults, AcceptanceRow, RowKey, conclusions, measure
from bench.sequoia import acceptance_table, best_tree, expected_accepted
from secateur.errors import ConfigError
from secateur.prompts import read_prompts
from secateur.token_tree import parse_token_tree


def exit_code(quick: dict, *flags: str) -> int:
    """Run the benchmark with these flags, in this process; return its exit code."""
    with mock.patch.object(sys, "argv", ["acceptance", *flags]), pytest.raises(SystemExit) as end:
        harness.main(AcceptancePlan, measure, quick)
    return end.value.code


# -- Sequoia's dynamic program ---------------------------------------------------------------------------------------


def all_trees(num_nodes: int, max_depth: int, max_children: int) -> set[tuple]:
    """Return every tree with this number of nodes."""
    trees: set[frozenset] = {frozenset()}
    for _ in range(num_nodes):
        grown = set()
        for tree in trees:
            for parent in [(), *tree]:
                rank = sum(len(path) == len(parent) + 1 and path[:-1] == parent for path in tree)
                if len(parent) < max_depth and rank < max_children:
                    grown.add(tree | {(*parent, rank)})
        trees = grown
    return {tuple(sorted(tree, key=lambda path: (len(path), path))) for tree in trees}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("max_depth", "max_children"), [(3, 3), (2, 4), (5, 2)])
def test_no_tree_of_the_same_size_is_expected_to_accept_more(seed: int, max_depth: int, max_children: int) -> None:
    rng = random.Random(seed)
    table = [[rng.random() * (0.8 if rank == 0 else 0.2) for rank in range(max_children)] for depth in range(max_depth)]
    for num_nodes in range(1, 7):
        tree = best_tree(num_nodes, table)
        others = all_trees(num_nodes, max_depth, max_children)
        assert tree in others and tree == parse_token_tree(str(list(tree)))
        best = max(expected_accepted(other, table) for other in others)
        assert expected_accepted(tree, table) == pytest.approx(best, abs=1e-12)


def test_certain_first_children_give_a_chain_and_a_rejected_second_level_a_star() -> None:
    assert best_tree(3, [[1.0, 0.0]] * 4) == ((0,), (0, 0), (0, 0, 0))
    assert best_tree(3, [[0.3, 0.2, 0.1], [0.0, 0.0, 0.0]]) == ((0,), (1,), (2,))


def test_a_tree_larger_than_the_table_is_an_error() -> None:
    assert len(best_tree(6, [[0.5, 0.1]] * 2)) == 6
    with pytest.raises(ValueError, match="no tree of 7 nodes"):
        best_tree(7, [[0.5, 0.1]] * 2)


def test_later_ranks_divide_the_first_ranks_rejections_at_every_depth() -> None:
    table = acceptance_table([0.6, 0.2], {1: 0.5, 2: 0.7, 4: 0.8}, 4)
    assert table[0] == pytest.approx([0.6, 0.4 * 0.4, 0.4 * 0.1, 0.4 * 0.1])
    assert table[1] == pytest.approx([0.2, 0.8 * 0.4, 0.8 * 0.1, 0.8 * 0.1])


# -- the report ------------------------------------------------------------------------------------------------------


def row(tree: str, kind: str, lengths: list[float], **changes: object) -> AcceptanceRow:
    settings: dict[str, object] = {
        "method": "eagle3",
        "num_speculative_tokens": 16,
        "temperature": 1.0,
        "max_depth": 8,
        "num_nodes": 16,
        "static_tree": None,
        "prune": "off",
        "prune_min_prob": 0.0,
        "prune_path_prob": 0.0,
        "prune_row_price": None,
        "acceptance_length_se": 0.1,
        "tokens_per_step": sum(lengths) / len(lengths),
        "verified_per_token": 4.0,
        "drafted_per_token": 4.0,
        "tokens_per_second": 100.0,
        "num_prompts": len(lengths),
        "num_tokens": 99,
    }
    mean = sum(lengths) / len(lengths)
    return AcceptanceRow(
        tree=tree, acceptance=kind, acceptance_length=mean, acceptance_lengths=lengths, **settings | changes
    )  # type: ignore[arg-type]


ROWS = [
    row("chain", "coupled", [9.0, 9.0], max_depth=16),  # the full chain is nobody's own
    row("chain", "coupled", [2.0, 3.0], num_nodes=8),
    row("static", "coupled", [2.9, 4.1]),
    row("dynamic", "coupled", [3.0, 4.01]),
    row("dynamic", "rejection", [3.0, 3.0]),
    row("dynamic", "none", [1.75, 1.755]),
    row("dynamic", "coupled", [2.9, 4.0], prune="thresholds", prune_min_prob=0.1, verified_per_token=1.0),
    row("dynamic", "coupled", [1.0, 1.5], prune="auto", verified_per_token=0.5),
]


def test_the_gain_of_draft_probabilities_uses_the_better_rule() -> None:
    assert AcceptanceResults(ROWS).gain("dynamic", 1.0, 16) == pytest.approx(2.0)
    assert AcceptanceResults(ROWS).gain("chain", 1.0, 16) is None


def test_differences_are_paired_by_prompt() -> None:
    ahead = AcceptanceResults(ROWS).ahead("chain", "coupled", 1.0, 16)
    assert ahead is not None and ahead.mean == pytest.approx(1.005) and ahead.error == pytest.approx(0.005)
    assert ahead.sign == 1 and RowKey("chain", "coupled", 16, 1.0, is_full=True) in AcceptanceResults(ROWS).by_key
    even = AcceptanceResults(ROWS).ahead("static", "coupled", 1.0, 16)
    assert even is not None and even.sign == 0


def test_conclusions_show_gains_differences_and_what_pruning_saves() -> None:
    found = list(conclusions(ROWS))
    gain = {"tree": "dynamic", "temperature": 1.0, "nodes": 16, "gain": pytest.approx(2.0)}
    assert ("draft probabilities", gain) in found
    gaps = {row["other"]: row for table, row in found if table == "dynamic minus others"}
    assert gaps["chain"]["verdict"] == "ahead" and gaps["static"]["verdict"] == "even"
    pruned = {row["pruning"]: row for table, row in found if table == "pruning"}
    assert (pruned["min_prob 0.1"]["saved"], pruned["auto"]["saved"]) == (0.75, 0.875)
    assert pruned["min_prob 0.1"]["kept"] == pytest.approx(3.45 / 3.5) and pruned["off"]["saved"] == 0


# -- what is refused, and prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nodes", "4", "99"], "nodes.1: must be less than or equal to 63 (got 99)"),
        (["--temperatures", "-1"], "temperatures.0: must be greater than or equal to 0"),
        (["--num-prompts", "99"], "has 50 prompts; ask for at most that many, not 99"),
        (["--prompts", "/nowhere.jsonl"], "--prompts: cannot read /nowhere.jsonl"),
        (
            ["-sc", '{"model": "org/x", "speculative_tree_max_depth": 1}'],
            "no tree of depth 1 with 8 children per node has 32",
        ),
        (["--no-speculation"], "give --speculative-config"),
        (["org/model"], "give --speculative-config"),
        (
            ["-sc", '{"model": "org/x", "acceptance": "coupled"}'],
            "speculative_config.acceptance: is what the benchmark",
        ),
        (["--speculative-tree-prune-threshold", "0.1"], "prune_threshold: is what the benchmark varies; remove it"),
    ],
)
def test_wrong_arguments_are_one_message_and_exit_code_2(flags, says, capsys) -> None:
    assert exit_code({}, *flags) == 2
    error = capsys.readouterr().err
    assert says in error and "at least 1 item" not in error, "one mistake, one complaint"


@pytest.mark.parametrize("line", ["{", '"text"', '{"text": ""}', '{"messages": []}', '{"prompt": "a"}'])
def test_an_invalid_line_of_a_prompts_file_is_reported_by_number(line, capsys, tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    assert exit_code({}, "--prompts", str(file), "--num-prompts", "1") == 2
    assert f"--prompts: {file}, line 2: " in capsys.readouterr().err


@pytest.mark.parametrize("most", [1, 2, 3, 99])
def test_a_short_prompts_file_gives_all_its_prompts(most, tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"text": "{name}"}}\n' for name in "abc"))
    assert [prompt.text for prompt in read_prompts(file, most)] == list("abc")[:most]


def test_an_empty_prompts_file_is_an_error(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(file, 1)


# -- a real run ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_on_the_bundled_pair(tmp_path, capsys) -> None:
    few = {"temperatures": (1.0,), "nodes": (12,), "row_prices": (0.03,), "num_prompts": 2, "max_tokens": 8}
    assert exit_code(few, "--quick", "--concurrency", "4", "--output", str(tmp_path)) == 0
    [file] = tmp_path.glob("*-acceptance.json")
    written = json.loads(file.read_text())
    rows = [AcceptanceRow(**raw) for raw in written["rows"]]
    assert {"draft probabilities", "dynamic minus others", "pruning"} < written.keys()
    unpruned = [row for row in rows if row.prune == "off"]
    cells = {(row.tree, row.acceptance, row.temperature, row.max_depth) for row in unpruned}
    assert len(cells) == len(unpruned) == (1 + 3) * len(ACCEPTANCES)  # the full chain, and three trees
    for row in unpruned:
        assert row.num_speculative_tokens == 12
        assert row.num_nodes == (row.max_depth if row.tree == "chain" else 12)
        assert 1 < row.acceptance_length <= 1 + row.max_depth and row.tokens_per_second > 0
        assert row.drafted_per_token == row.verified_per_token > 0
        assert row.num_tokens == 2 * 8 and len(row.acceptance_lengths) == row.num_prompts == 2
        assert (row.static_tree is not None) == (row.tree == "static")
    assert {str(row.pruning) for row in rows} >= {"min_prob 0.1", "path_prob 0.05", "auto", "auto at 0.03 a row"}
    assert capsys.readouterr().out.strip() == file.with_suffix(".md").read_text().strip()
