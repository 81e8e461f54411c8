"""All that a GPU can show, in the order of what is worth most: ten minutes of one H200.

    python -m tests.gpu.run [--output DIR] [--only smoke twins ...] [--minutes 2.5]

Tests run first, side by side, for they share the GPU and measure nothing; then benchmarks, one after the other. Every
part is a process with a time limit. Its output goes to DIR/gpu-PART.log while it runs, and its result is appended to
DIR/gpu.jsonl when it ends, so that a machine that is taken away leaves what was shown until then. A part that fails or
takes too long does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

TESTS = "tests/gpu/test_gpu.py"
MODELS = "tests/gpu/test_gpu_models.py"
CACHE = "build/bench"
ON_8B = ("--target-cost", "8b+v128256", "--cache", CACHE)
_RECORD = threading.Lock()


@dataclass(frozen=True)
class Part:
    """A command of `python -m` and its limit."""

    name: str
    what: str
    minutes: float
    command: tuple[str, ...]


def tests(*arguments: str) -> tuple[str, ...]:
    """Return a run of tests that tells the slowest, and where one hangs."""
    return ("pytest", "-p", "no:benchmark", "--durations=8", "-o", "faulthandler_timeout=100", *arguments)


def bench(name: str, *arguments: str) -> tuple[str, ...]:
    return (f"bench.{name}", *arguments, "--device", "cuda", "--output", "{output}")


TOGETHER = [
    Part("smoke", "an engine under auto gives transformers' tokens", 5, tests("-x", TESTS, "-k", "greedy and auto")),
    Part("twins", "every kernel against its twin", 6,
         tests("-n", "8", "tests/gpu/test_gpu_kernels.py", "tests/gpu/test_gpu_rejection.py",
               "tests/workers/kernels/test_triton_delta.py", "-k", "not compiles_for")),
    Part("graphs", "replays against eager steps", 5, tests("-n", "3", "tests/gpu/test_gpu_graphs.py")),
    Part("link", "the NCCL link between drafter and verifier", 5, tests("-n", "4", TESTS, "-k", "nccl")),
    Part("split", "the target on two ranks", 6, tests("-n", "3", TESTS, "-k", "split")),
    Part("invariant", "texts in bfloat16, alone and in a crowd", 5, tests(TESTS, "-k", "invariant")),
    Part("cache", "a KV cache in 8 bits", 5, tests("-n", "2", TESTS, "-k", "kv_cache")),
    Part("families", "hybrids, latents, soft caps and quantised weights", 5,
         tests("-n", "3", MODELS, "-k", "transformers or quantised")),
    Part("one_pass", "heads that draft in one pass", 5, tests("-n", "3", MODELS, "-k", "speculation")),
    Part("engines", "the other tests of engines", 8,
         tests("-n", "5", TESTS, "-k", "not (nccl or split or invariant or kv_cache or greedy and auto)")),
    Part("weights", "the weights of a pair of 8B size, for the benchmarks", 4, ("tests.gpu.weights", CACHE)),
]  # fmt: skip
ALONE = [
    Part("latency", "an engine of 8B size: its start and memory, first tokens, and tokens of 1 to 128 requests", 1.7,
         bench("speed", *ON_8B, "--shared", "--contestants", "off,auto", "--batches", "1", "8", "32", "64", "128",
               "--rounds", "3", "--prompt-tokens", "2048", "--prompt-tokens", "8192")),
    Part("profile", "each kernel's share of a verify step and of trees", 0.9, ("bench.gpu_profile", *ON_8B)),
    Part("kernels", "products, attention, delta nets and draws beside their twins", 0.7,
         ("bench.kernels", "--output", "{output}")),
    Part("chain", "the same engine with chains, which grow without a choice", 1,
         bench("speed", *ON_8B, "--shared", "--contestants", "off,chain", "--batches", "1", "8", "64",
               "--temperatures", "0", "--rounds", "2")),
]  # fmt: skip
"""One after the other, what is worth most first; they keep the rows that they have when their time is over."""


def run(part: Part, output: Path) -> bool:
    """Run one part and record its result; return whether it succeeded."""
    command = [sys.executable, "-m", *(argument.format(output=output) for argument in part.command)]
    log, began = output / f"gpu-{part.name}.log", time.monotonic()
    print(f"{part.name}: {part.what} (up to {part.minutes:g} minutes; {log})", flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            status: int | None = process.wait(timeout=60 * part.minutes)
        except subprocess.TimeoutExpired:
            status = None
            process.send_signal(signal.SIGINT)  # pytest still tells what failed; engines end with who started them
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    result = "passed" if status == 0 else "took too long" if status is None else f"failed with status {status}"
    seconds = round(time.monotonic() - began, 1)
    row = {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "part": part.name, "result": result, "seconds": seconds}
    with _RECORD, (output / "gpu.jsonl").open("a") as file:
        file.write(json.dumps(row | {"command": " ".join(part.command)}) + "\n")
    print(f"{part.name}: {result} after {seconds:g} s", flush=True)
    return status == 0


def main() -> None:
    parts = {part.name: part for part in (*TOGETHER, *ALONE)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("bench/results"))
    parser.add_argument("--only", nargs="+", choices=parts, help="these parts alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of a part at most, where it has more")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    import torch

    if not torch.cuda.is_available():
        sys.exit("tests.gpu.run: no CUDA device here, so nothing was shown")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    asked = [parts[name] for name in options.only or parts]
    asked = [replace(part, minutes=min(part.minutes, options.minutes)) for part in asked]
    started, together = partial(run, output=options.output), {part.name for part in TOGETHER}
    with ThreadPoolExecutor(len(TOGETHER)) as pool:
        results = list(pool.map(started, [part for part in asked if part.name in together]))
    results += map(started, [part for part in asked if part.name not in together])
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
