"""A step's tree as lines of text, for `--show-trees`."""

from __future__ import annotations

from collections import defaultdict

import typer

from secateur.responses import SpeculativeTree, TreeNode

_WIDTH = 44  # column of the status
_COLOURS = {"accepted": typer.colors.GREEN, "rejected": typer.colors.RED, "pruned": typer.colors.BRIGHT_BLACK}


def draw_tree(tree: SpeculativeTree, number: int) -> list[str]:
    """Return the lines of step `number`: what it added, then its nodes, coloured by status."""
    children: dict[int | None, list[int]] = defaultdict(list)
    for i, node in enumerate(tree.nodes):
        children[node.parent].append(i)
    lines = [_headline(tree, number)]

    def add(i: int, branch: str, indent: str) -> None:
        lines.append(_line(branch, tree.nodes[i]))
        for child in children[i]:
            is_last = child == children[i][-1]
            add(child, indent + ("└─ " if is_last else "├─ "), indent + ("   " if is_last else "│  "))

    for root in children[None]:
        add(root, "", "")
    return lines


def _headline(tree: SpeculativeTree, number: int) -> str:
    kept = [token for token in tree.tokens if token.origin != "bonus"]
    added = " ".join(repr(token.text) for token in tree.tokens) or "nothing"
    parts = [f"{len(kept)} {'copied' if tree.is_copied else 'accepted'}"]
    if tree.draft_ms is not None:
        parts.append(f"draft {tree.draft_ms:.1f} ms")
    return typer.style(f"step {number}: {added}", bold=True) + f"  ({', '.join(parts)}, verify {tree.verify_ms:.1f} ms)"


def _line(branch: str, node: TreeNode) -> str:
    token = "(not drafted)" if node.text is None else repr(node.text)
    status = f"pruned: {node.pruned_by}" if node.status == "pruned" else node.status
    q = "" if node.draft_prob is None else f"q {node.draft_prob:.3f}"
    text = f"{branch + token:{_WIDTH}}{status:20}{q}".rstrip()
    return typer.style(text, fg=_COLOURS.get(node.status))
