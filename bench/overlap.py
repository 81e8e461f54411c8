"""Computes what hiding drafting behind verification could gain on a GPU, from the prices of a step.

    python -m bench.overlap

`half-batches`: the drafter drafts for one half of the requests while the target verifies the other. `pre-drafting`:
while the target verifies, the drafter reads the tree once more and grows trees below its likeliest outcomes; a share of
the outcomes is predicted. Both are compared with the faster of drafting and verifying in turn and of no drafts, each
with the tree size that suits it best. Times are in milliseconds.
"""

from __future__ import annotations

import numpy as np

# An 8B model in bfloat16 on an H200: a forward by rows (2026-11-26, `secateur bench step --target-cost 8b`, and 0.5 ms
# for the logits of a vocabulary of 128k), and beyond 264 rows its slope there.
ROWS = [1, 8, 40, 72, 136, 264, 512, 1088]
FORWARD_MS = [5.1, 5.3, 5.5, 5.9, 7.4, 10.0, 15.0, 27.5]
# A head of such a model, a tree of eight levels in one graph (results/2026-11-27-gpu-h200.md, two sizes of batch); and
# a head that drafts all levels in one pass.
TREE_MS = {"level by level": ([1, 8, 32, 64], [3.6, 4.0, 6.3, 9.5]), "one pass": ([1, 64], [0.5, 0.8])}
TRANSFER_MS = (0.1, 1.2)  # between two GPUs; through the memory of the host
HOST_MS = (0.3, 0.018)  # of a step, and of each of its requests
TOKENS = {2: 1.95, 4: 2.6, 8: 3.25, 16: 4.0}  # of a step, by the nodes of a tree; without drafts 1
PREDICTED = {1: 0.45}  # share of the outcomes among 16 predictions; of batches a sixth


def forward_ms(rows: float) -> float:
    """Return the time of a forward."""
    return float(np.interp(rows, ROWS, FORWARD_MS))


def rates(requests: int, head: str, transfer_ms: float) -> dict[str, float]:
    """Return the tokens per millisecond of each way to use the time, with its best tree."""

    def draft_ms(number: float) -> float:
        return float(np.interp(number, *TREE_MS[head])) + transfer_ms

    def step_ms(way: str, nodes: int) -> float:
        whole_ms, host_ms = forward_ms(requests * (1 + nodes)), HOST_MS[0] + HOST_MS[1] * requests
        match way:
            case "in turn":
                return whole_ms + draft_ms(requests) + host_ms
            case "half-batches":
                half = requests / 2
                return 2 * (max(forward_ms(half * (1 + nodes)), draft_ms(half)) + HOST_MS[0] + HOST_MS[1] * half)
            case _:  # what is not ready when the target has verified is waited for
                hit, ahead_ms = PREDICTED.get(requests, 1 / 6), 2 * (draft_ms(requests) - transfer_ms)
                late_ms = max(0.0, ahead_ms - whole_ms - host_ms)
                return whole_ms + host_ms + late_ms + transfer_ms + (1 - hit) * (draft_ms(requests) - transfer_ms)

    ways = ("in turn", "half-batches", "pre-drafting") if requests > 1 else ("in turn", "pre-drafting")
    best = {way: max(requests * tokens / step_ms(way, nodes) for nodes, tokens in TOKENS.items()) for way in ways}
    no_drafts = requests / (forward_ms(requests) + HOST_MS[0] + HOST_MS[1] * requests)
    return best | {"in turn": max(best["in turn"], no_drafts)}


def main() -> None:
    """Print one line per head, transfer and size of batch."""
    print("| head | transfer, ms | requests | half-batches | pre-drafting |\n| --- | --- | --- | --- | --- |")
    for head in TREE_MS:
        for transfer_ms in TRANSFER_MS:
            for requests in (1, 4, 8, 16, 32, 64):
                rate = rates(requests, head, transfer_ms)
                ratio = {way: f"{own / rate['in turn']:.2f}" for way, own in rate.items()}
                columns = head, f"{transfer_ms:g}", requests, ratio.get("half-batches", ""), ratio["pre-drafting"]
                print(f"| {' | '.join(map(str, columns))} |")


if __name__ == "__main__":
    main()
