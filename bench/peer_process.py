"""One peer of a speed benchmark, run by the interpreter of the peer's own virtual environment.

    python peer_process.py vllm|llamacpp|openvino SETTINGS

SETTINGS is a JSON object. The first line on stdout is {"url": ...}: where the peer serves HTTP, now or soon. openvino
has no server: its url is null, and from then on it answers each line of jobs on stdin with a line of answers. What
libraries print goes to stderr. The whole process group ends when stdin closes, however the benchmark ended.

Imports nothing of Secateur, which the peer's environment does not have.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import IO, Any


def vllm(settings: dict[str, Any], pipe: IO[str]) -> None:
    """Serve with vLLM. Its command `vllm serve` does not run where the distribution is not called vllm."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _say(pipe, {"url": f"http://127.0.0.1:{port}"})
    module = "vllm.entrypoints.openai.api_server"
    sys.argv = [module, "--host", "127.0.0.1", "--port", str(port), *settings["arguments"]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def llamacpp(settings: dict[str, Any], pipe: IO[str]) -> None:
    """Serve with llama.cpp's server."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.n_parallel = settings["parallel"]
    params.n_ctx = settings["parallel"] * settings["context"]
    params.n_gpu_layers = 0
    params.cache_prompt = params.fit_params = params.ui = False
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)  # returns when the model is loaded
    _say(pipe, {"url": server.listening_address})
    threading.Event().wait()


def openvino(settings: dict[str, Any], pipe: IO[str]) -> None:
    """Answer lines of jobs with OpenVINO GenAI's continuous batching."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = settings["cache_gib"]
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = settings["parallel"]
    options = {"INFERENCE_NUM_THREADS": settings["threads"], "INFERENCE_PRECISION_HINT": settings["precision"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", options)
    _say(pipe, {"url": None})
    for line in sys.stdin:
        _say(pipe, {"answers": _openvino_turn(pipeline, **json.loads(line))})


def _openvino_turn(pipeline: Any, jobs: list[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """Answer all jobs, `batch` at a time, in order. Seconds count from when a job is handed to the pipeline."""
    import openvino_genai

    answers: list[dict[str, Any]] = [{"tokens": [], "first_seconds": 0.0, "seconds": 0.0} for _ in jobs]
    waiting = deque(range(len(jobs)))
    running: dict[int, tuple[float, Any]] = {}  # when it began, and its handle
    while waiting or running:
        while waiting and len(running) < batch:
            index = waiting.popleft()
            running[index] = time.perf_counter(), _openvino_request(pipeline, index, jobs[index])
        pipeline.step()
        for index, (began, handle) in list(running.items()):
            answer = answers[index]
            while handle.can_read():
                [output] = handle.read().values()
                answer["tokens"] += output.generated_ids
                answer["seconds"] = time.perf_counter() - began
                answer["first_seconds"] = answer["first_seconds"] or answer["seconds"]
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del running[index]
    return answers


def _openvino_request(pipeline: Any, index: int, job: dict[str, Any]) -> Any:
    import numpy as np
    import openvino as ov
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = job["max_tokens"], True
    config.do_sample = job["temperature"] > 0
    if config.do_sample:
        config.temperature, config.top_p, config.rng_seed = job["temperature"], 1.0, job["seed"]
    return pipeline.add_request(index, ov.Tensor(np.array([job["prompt"]], dtype=np.int64)), config)


def _say(pipe: IO[str], message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()


def _end_with_stdin() -> None:
    """End the process group when stdin closes, which the kernel does for a parent that was killed."""

    def wait() -> None:
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main(peer: str, settings: dict[str, Any]) -> None:
    """Run one peer until stdin closes."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    match peer:
        case "openvino":
            openvino(settings, pipe)
        case "vllm" | "llamacpp":
            _end_with_stdin()
            (vllm if peer == "vllm" else llamacpp)(settings, pipe)
        case _:
            sys.exit(f"no peer {peer!r}")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
