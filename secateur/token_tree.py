"""The static tree string: `speculative_token_tree`, e.g. "[(0,), (1,), (0, 0), (0, 1)]".

A node is the tuple of child ranks on its path from the root: (1, 0) is the most likely child of the root's second
most likely child. The root is never listed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

MAX_NODES = 63  # 64 rows per request in the ancestor bitmask, one of which is the root

Path = tuple[int, ...]


def parse_token_tree(text: str) -> tuple[Path, ...]:
    """Return the paths of a tree string in breadth-first order, by (depth, ranks).

    Raises ValueError for a string that is not a list of tuples of non-negative integers, for an empty list, a duplicate
    node, a node without its parent, a rank that skips a sibling ((0,), (2,)), and more than 63 nodes.
    """
    try:
        paths = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        paths = None
    if not isinstance(paths, list | tuple) or not all(_is_path(path) for path in paths):
        raise ValueError(
            f"malformed tree {text!r}; write a list of tuples of child ranks, for example '[(0,), (1,), (0, 0)]'"
        )
    return check_paths(paths)


def check_paths(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return `paths` in breadth-first order. Raises ValueError for the first invalid node."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    if not ordered:
        raise ValueError("the tree is empty; list at least one node, for example '[(0,)]'")
    if len(ordered) > MAX_NODES:
        raise ValueError(f"the tree has {len(ordered)} nodes; at most {MAX_NODES} fit (the root is not listed)")
    seen: set[Path] = set()
    for path in ordered:
        if path in seen:
            raise ValueError(f"node {path} is listed twice; list it once")
        if len(path) > 1 and path[:-1] not in seen:
            raise ValueError(f"node {path} has no parent; add {path[:-1]} or remove {path}")
        if path[-1] > 0 and (sibling := (*path[:-1], path[-1] - 1)) not in seen:
            raise ValueError(f"node {path} skips a sibling; add {sibling} or renumber {path}")
        seen.add(path)
    return tuple(ordered)


def _is_path(path: object) -> bool:
    if not isinstance(path, tuple) or not path:
        return False
    return all(type(rank) is int and rank >= 0 for rank in path)
