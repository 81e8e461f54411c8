"""What `auto` earns on a clock that moves by chosen prices: the bundled pair's real tokens, free of a machine's noise.

    python tests/bench/economy.py [--batches 1 8] [--temperatures 0 1]

For each set of prices: tokens per millisecond, prompts included, relative to no speculation, of dynamic trees of 16 and
of 2 nodes and of `auto` as it starts and once it has seen all prompts twice. Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

import torch  # noqa: E402
from clockwork import AUTO, FIXED, OFF, Prices, bench  # noqa: E402

from workers.ipc import Speculation  # noqa: E402

MARKETS = {
    "two quiet CPU cores": Prices(fixed=2, row=0.2, message=0.4, fed=0.02, level=0.75, node=0.03),
    "a target of 300 M parameters on them": Prices(fixed=38, row=2.9, message=0.7, fed=0.03, level=1, node=0.05),
    "the same, a tree takes 8 ms more": Prices(fixed=38, row=2.9, message=0.7, fed=0.03, level=1, node=0.05, tree=8),
    "a step 20 ms, rows nearly free": Prices(fixed=20, row=0.05, message=0.5, fed=0.01, level=1, node=0.01),
    "dear drafts": Prices(fixed=3, row=0.5, message=4, fed=0.05, level=3, node=0.3),
}
WAYS = {
    "off": OFF,
    "16": FIXED,
    "2": Speculation(auto=False, num_tokens=2),
    "first": AUTO,
    "again": AUTO,
    "later": AUTO,
}
NUM_TOKENS = 48


def gains(prices: Prices, temperature: float, batch: int) -> dict[str, float]:
    """Each way's rate over that of no speculation, asked one after the other in one engine."""
    with bench(prices) as engine:
        rate = {
            way: engine.run(asked, batch, temperature, max(8, batch), NUM_TOKENS).rate for way, asked in WAYS.items()
        }
    return {way: one / rate["off"] for way, one in rate.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| prices | T | requests | 16 nodes | 2 nodes | auto at first | auto later |\n|---|---|---|---|---|---|---|")
    for name, prices in MARKETS.items():
        for temperature in args.temperatures:
            for batch in args.batches:
                gain = gains(prices, temperature, batch)
                cells = " | ".join(f"{gain[way]:.2f}" for way in ("16", "2", "first", "later"))
                print(f"| {name} | {temperature:g} | {batch} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
