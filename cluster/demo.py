"""`make demo`: starts the service on Ray, streams answers over HTTP, measures speculation, and stops everything."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple

import httpx2

from cluster.serve.launch import running
from cluster.system.processes import descendants, wait_gone
from secateur import Client
from secateur.config import EngineArgs

PROMPTS = (
    "def binary_search(items, target):\n    low, high =",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "def read_lines(path):\n    with open(path) as",
)
QUESTION = "Write a function that reads a file."
WAYS: dict[str, dict[str, Any]] = {
    "off": {"enabled": False},
    "trees of 4 nodes": {"tree_prune": "off", "num_speculative_tokens": 4},
    "trees of 16 nodes": {"tree_prune": "off"},
    "auto (default)": {"tree_prune": "auto"},  # adapts trees to this machine and uses prompt lookup
}
MAX_TOKENS = 64
REPETITIONS = 3
END_TIMEOUT_S = 15.0


class Run(NamedTuple):
    """One answer to one prompt."""

    text: str
    num_tokens: int
    seconds: float
    acceptance_length: float
    num_verified: int  # nodes of trees


def main() -> int:
    """Run the demo; return 0 if all greedy texts are equal with and without drafts and no process is left, else 1."""
    began = time.monotonic()
    print("Starting the service on Ray: one verifier, one drafter, the bundled models, on CPU ...", flush=True)
    with running(EngineArgs.load({"device": "cpu", "port": 0})) as url:
        print(f"Ready after {time.monotonic() - began:.0f} s at {url}\n")
        _print_topology(url)
        with Client(url) as client:
            _stream(client)
            same = _compare(client)
        ours = descendants()
    left = wait_gone(ours, timeout_s=END_TIMEOUT_S)
    print(f"\nStopped; {len(ours)} processes ended, {len(left)} left. {time.monotonic() - began:.0f} s in all.")
    if left:
        print(f"Still running: {left}", file=sys.stderr)
    if not same:
        print("Greedy texts differ with and without speculation", file=sys.stderr)
    print("Next: `make chat` talks to a larger model; `.venv/bin/secateur serve` has a page that shows the trees.")
    return 0 if same and not left else 1


def _print_topology(url: str) -> None:
    info = httpx2.get(f"{url}/server_info").raise_for_status().json()
    print(f"{'role':<12}{'rank':<6}{'pid':<9}device")
    for entry in [{"role": "front", "pid": info["front"]["pid"], "device": "cpu"}, *info["topology"]]:
        print(f"{entry['role']:<12}{entry.get('rank', '-')!s:<6}{entry['pid']:<9}{entry['device']}")


def _stream(client: Client) -> None:
    print(f"\n> {QUESTION}")
    for chunk in client.stream_chat(QUESTION, max_tokens=MAX_TOKENS, temperature=0):
        print(chunk.text, end="", flush=True)
    print(f"\n\n> {PROMPTS[0]}", end="")
    for part in client.stream_complete(PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0):
        print(part.text, end="", flush=True)
    print()


def _compare(client: Client) -> bool:
    """Print the speed with each setting; return whether all of them gave the same greedy texts."""
    runs: dict[str, list[list[Run]]] = {way: [[] for _ in PROMPTS] for way in WAYS}
    for _ in range(REPETITIONS):
        for index, prompt in enumerate(PROMPTS):  # interleaved, so that a slower machine slows all settings alike
            for way, speculative in WAYS.items():
                runs[way][index].append(_run(client, prompt, speculative))
    texts = [{run.text for per_prompt in runs.values() for run in per_prompt[index]} for index in range(len(PROMPTS))]
    same = all(len(different) == 1 for different in texts)
    print(f"\n{len(PROMPTS)} prompts, greedy, {MAX_TOKENS} tokens each; medians of {REPETITIONS} interleaved runs")
    print(f"{'speculation':<20}{'tokens/s':<11}{'ratio':<8}{'acceptance length':<20}nodes verified per token")
    for way, per_prompt in runs.items():
        speed, all_runs = _median_speed(per_prompt), [run for each in per_prompt for run in each]
        length = statistics.mean(run.acceptance_length for run in all_runs)
        nodes = sum(run.num_verified for run in all_runs) / sum(run.num_tokens for run in all_runs)
        print(f"{way:<20}{speed:<11.1f}{speed / _median_speed(runs['off']):<8.2f}{length:<20.2f}{nodes:.2f}")
    print(f"greedy texts {'equal' if same else 'DIFFERENT'}")
    return same


def _run(client: Client, prompt: str, speculative: dict[str, Any]) -> Run:
    began = time.perf_counter()
    answer = client.complete(
        prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        ignore_eos=True,
        speculative=speculative,
        return_speculative_stats=True,
    )
    seconds = time.perf_counter() - began
    usage, stats = answer.usage, answer.speculative
    assert usage is not None and stats is not None
    return Run(answer.text, usage.completion_tokens, seconds, stats.acceptance_length, stats.num_verified)


def _median_speed(runs: list[list[Run]]) -> float:
    return statistics.median(run.num_tokens / run.seconds for per_prompt in runs for run in per_prompt)


if __name__ == "__main__":
    sys.exit(main())
