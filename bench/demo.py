"""`make demo`: starts the service on Ray, streams answers over HTTP, measures speculation, and stops everything."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx2

from cluster.serve.launch import running
from cluster.system.processes import descendants, wait_gone
from secateur import Client
from secateur.config import BUNDLED_TARGET, SMOLLM2, EngineArgs, resolve_model
from secateur.errors import ConfigError

QUESTIONS = {
    SMOLLM2: (
        "What makes the sky blue?",
        "Write a short email to thank a colleague for her help.",
        "Write a Python function that reverses a string.",
        "Give me three tips for a good night's sleep.",
    ),
    BUNDLED_TARGET: (
        "Write a function that reads a file.",
        "Write a class for a stack.",
        "What does this function do? def add(a, b): return a + b",
        "Write a function that parses arguments.",
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "off": {"enabled": False},
    "trees of 4 nodes": {"tree_prune": "off", "num_speculative_tokens": 4},
    "trees of 16 nodes": {"tree_prune": "off"},
    "auto (default)": {"tree_prune": "auto"},  # adapts trees to this machine and uses prompt lookup
}
ON_A_GPU = "on an H100 a forward of 17 rows takes 1.02 times one of a single row (8B), so larger trees pay there"
MAX_TOKENS = 64
REPETITIONS = 3
END_TIMEOUT_S = 15.0


class TimedAnswer(NamedTuple):
    """One answer to one question."""

    text: str
    num_tokens: int
    seconds: float
    acceptance_length: float
    num_verified: int  # nodes of trees


def main() -> int:
    """Run the demo; return 0 if all greedy texts are equal with and without drafts and no process is left, else 1."""
    began = time.monotonic()
    model = _model()
    print(f"Starting the service on Ray: {model}, one verifier, one drafter, on CPU ...", flush=True)
    with running(EngineArgs.load({"model": model, "device": "cpu", "port": 0, "max_model_len": 2048})) as url:
        print(f"Ready after {time.monotonic() - began:.0f} s at {url}\n")
        _print_topology(url)
        with Client(url) as client:
            _stream(client, QUESTIONS[model][0])
            same = _compare(client, QUESTIONS[model])
        ours = descendants()
    left = wait_gone(ours, timeout_s=END_TIMEOUT_S)
    print(f"\nStopped; {len(ours)} processes ended, {len(left)} left. {time.monotonic() - began:.0f} s in all.")
    if left:
        print(f"Still running: {left}", file=sys.stderr)
    if not same:
        print("Greedy texts differ with and without speculation", file=sys.stderr)
    print(
        f"Next: `make chat` opens a conversation; `.venv/bin/secateur serve {model}` has a page that shows the trees."
    )
    return 0 if same and not left else 1


def _model() -> str:
    """Return SmolLM2 if its package is installed, else the bundled target."""
    try:
        resolve_model(SMOLLM2)
    except ConfigError as error:
        print(f"{error}. Until then the demo shows the bundled model, which knows only Python code.")
        return BUNDLED_TARGET
    return SMOLLM2


def _print_topology(url: str) -> None:
    info = httpx2.get(f"{url}/server_info").raise_for_status().json()
    print(f"{'role':<12}{'rank':<6}{'pid':<9}device")
    for entry in [{"role": "front", "pid": info["front"]["pid"], "device": "cpu"}, *info["topology"]]:
        print(f"{entry['role']:<12}{entry.get('rank', '-')!s:<6}{entry['pid']:<9}{entry['device']}")


def _stream(client: Client, question: str) -> None:
    print(f"\n> {question}")
    for chunk in client.stream_chat(question, max_tokens=2 * MAX_TOKENS, temperature=0):
        print(chunk.text, end="", flush=True)
    print()


def _compare(client: Client, questions: Sequence[str]) -> bool:
    """Print the speed with each setting; return whether all of them gave the same greedy texts."""
    runs: dict[str, list[list[TimedAnswer]]] = {way: [[] for _ in questions] for way in WAYS}
    for _ in range(REPETITIONS):
        for index, question in enumerate(questions):  # interleaved, so that a slower machine slows all settings alike
            for way, speculative in WAYS.items():
                runs[way][index].append(_run(client, question, speculative))
    texts = [{run.text for per_question in runs.values() for run in per_question[i]} for i in range(len(questions))]
    same = all(len(different) == 1 for different in texts)
    print(f"\n{len(questions)} questions, greedy, {MAX_TOKENS} tokens each; medians of {REPETITIONS} interleaved runs")
    print(f"{'speculation':<20}{'tokens/s':<11}{'ratio':<8}{'acceptance length':<20}nodes verified per token")
    off, reasons = _median_speed(runs["off"]), dict[str, str]()
    for way, per_question in runs.items():
        speed, all_runs = _median_speed(per_question), [run for each in per_question for run in each]
        length = statistics.mean(run.acceptance_length for run in all_runs)
        nodes = sum(run.num_verified for run in all_runs) / sum(run.num_tokens for run in all_runs)
        print(f"{way:<20}{speed:<11.1f}{speed / off:<8.2f}{length:<20.2f}{nodes:.2f}")
        reasons[way] = f"{length:.1f} tokens for the time of {length * off / speed:.1f} plain steps"
    print(
        f"A step with a tree of 4 nodes gives {reasons['trees of 4 nodes']} on this machine, one of 16 nodes "
        f"{reasons['trees of 16 nodes']}; {ON_A_GPU}."
    )
    print(f"greedy texts {'equal' if same else 'DIFFERENT'}")
    return same


def _run(client: Client, question: str, speculative: dict[str, Any]) -> TimedAnswer:
    began = time.perf_counter()
    answer = client.chat(
        question,
        max_tokens=MAX_TOKENS,
        temperature=0,
        ignore_eos=True,
        speculative=speculative,
        return_speculative_stats=True,
    )
    seconds = time.perf_counter() - began
    usage, stats = answer.usage, answer.speculative
    assert usage is not None and stats is not None
    return TimedAnswer(answer.text, usage.completion_tokens, seconds, stats.acceptance_length, stats.num_verified)


def _median_speed(runs: list[list[TimedAnswer]]) -> float:
    return statistics.median(run.num_tokens / run.seconds for per_question in runs for run in per_question)


if __name__ == "__main__":
    sys.exit(main())
