"""Engines on a simulated CUDA device, with graphs, Triton launches and copies, give the CPU's tokens."""

from __future__ import annotations

import asyncio
import math
import os
import select
import signal
import socket
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from tests.support import checkpoints

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("runs on the GPU in gpu/", allow_module_level=True)

from cluster.bench.runner import GenerationJob, Runner
from cluster.engine.engine_client import EngineClient
from cluster.engine.local_engine import LocalEngine
from cluster.engine.rank_exits import EngineDead
from drafter.drafter import Drafter as DraftModel
from drafter.drafter import warm_up_requests
from drafter.methods import load_proposer
from drafter.tree.policy import make_tree_policy
from tests.support.engine_here import Alone
from tests.support.simulated_cuda import simulated_cuda
from verifier import worker as verifier_worker
from verifier.adaptive.cost_model import UNPROFILED
from verifier.engine import Engine
from verifier.target import Target
from verifier.warm_up import warm_up
from workers.comm.channel import Channel, DevicePart, Received, Transport
from workers.comm.ipc import FrameDecoder, FrameSocket, Speculation, StepOutput, Submit, TokenLogprobs, encode
from workers.comm.wire import Message
from workers.config import DraftConfig, EngineConfig, PruneConfig, SimulatedCosts, TreeConfig
from workers.cuda_graphs import Graphs, Recorder
from workers.kernels.prompt_attention import PromptPlan
from workers.kernels.select import kernels_for
from workers.models.decoder import Decoder
from workers.models.draft_methods import method_of, read_specs
from workers.settings import Constraints, SamplingSettings
from workers.types import DraftRequest

torch.set_num_threads(1)

# ---- the device


def test_tensors_of_two_devices_cannot_be_mixed() -> None:
    with simulated_cuda():
        x = torch.ones(2, 3, device="cuda")
        assert x.is_cuda and x.device == torch.device("cuda", 0) and (x @ x.T).is_cuda
        for mixed in (lambda: x + torch.ones(3), lambda: torch.cat([x, torch.ones(1, 3)]), lambda: x @ torch.ones(3)):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        assert (x * torch.tensor(2.0)).tolist() == [[2.0] * 3] * 2, "a number is nobody's"


def test_torch_is_afterwards_as_it_was() -> None:
    _device_constructors.cache_clear()
    with simulated_cuda(), torch.device("meta"):
        torch.zeros(1)
    with torch.device("meta"):  # transformers asks this before it decides which buffers it initializes
        assert torch.tensor([]).is_meta and torch.zeros(1).is_meta
    assert torch.tensor([]).is_cpu


def test_waits_of_the_host_are_recorded() -> None:
    with simulated_cuda() as cuda:
        x = torch.arange(4).to("cuda", non_blocking=True)
        y = (x.view(2, 2) * 2)[:, 1]
        y.copy_(torch.tensor([7, 8]), non_blocking=True)
        assert not cuda.waits
        for look in (
            y.cpu,
            y.tolist,
            lambda: int(y[0]),
            lambda: bool((y > 0).all()),
            lambda: y[y > 7],
            lambda: y[[1]],
            lambda: torch.ones(2).to("cuda"),
            lambda: torch.tensor([1], device="cuda"),
            lambda: torch.arange(2, device="cuda").repeat_interleave(y),
        ):
            before = len(cuda.waits)
            look()
            assert cuda.waits[before:] and all("test_simulated_cuda" in wait for wait in cuda.waits[before:])
        with pytest.raises(AssertionError, match="not arrived"):
            y.to("cpu", non_blocking=True)


def test_a_replay_reads_its_buffers_alone() -> None:
    with simulated_cuda():
        buffer, other = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
        baked = 1.0

        def run() -> torch.Tensor:
            out = torch.empty(3, device="cuda")
            out[1:] = (buffer + baked)[1:].sin().clamp_(min=0)
            other.add_(1)
            return out.nan_to_num(5)

        replay = Recorder(torch.device("cuda", 0)).record(run)
        buffer.copy_(torch.tensor([1.0, 2.0, 0.5]))
        baked, before = 100.0, other.clone()
        torch.testing.assert_close(replay().cpu(), torch.tensor([5.0, math.sin(3.0), math.sin(1.5)]))
        assert (other - before).tolist() == [1.0] * 3
        for forbidden in (lambda: buffer.sum().item(), lambda: torch.ones(3).to("cuda"), lambda: buffer[buffer > 0]):
            with pytest.raises(RuntimeError, match=r"capturing|a graph would copy"):
                Recorder(torch.device("cuda", 0)).record(forbidden)


# ---- engines


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target whose middle layer has a window, drafters for it, and models for transformers' classes."""
    root = tmp_path_factory.mktemp("models")
    windowed = checkpoints.sliding(9, "full_attention", "sliding_attention", "full_attention")
    checkpoints.write_model(root / "target", "qwen2", num_hidden_layers=3, **windowed)
    checkpoints.write_model(root / "unwindowed", "qwen2", num_hidden_layers=3)
    checkpoints.write_eagle3(root / "eagle3")
    checkpoints.write_eagle3(root / "peagle", parallel={"ptd_token_id": 2}, num_hidden_layers=2)
    checkpoints.write_block(
        root / "dspark", block_size=4, **checkpoints.sliding(5, "sliding_attention", "full_attention")
    )
    checkpoints.write_model(root / "draft_model", "llama", num_hidden_layers=1, seed=1)
    checkpoints.write_model(root / "olmo2", "olmo2")
    checkpoints.write_model(root / "olmo2_draft", "olmo2", num_hidden_layers=1, seed=1)
    return root


def stream() -> Transport:
    """A stream of bytes within this thread."""
    sent: deque[torch.Tensor] = deque()

    def take(tensor: torch.Tensor) -> None:
        tensor.copy_(sent[0][: len(tensor)], non_blocking=tensor.is_cuda)
        sent[0] = sent[0][len(tensor) :]
        if not len(sent[0]):
            sent.popleft()

    return Transport(put=lambda tensor: sent.append(tensor.clone()), take=take)


class Drafter:
    """Both ends of the link to a drafter in this thread; frames are bytes, on the device if the link is."""

    def __init__(self, config: EngineConfig, device: torch.device, draft: Callable[[DraftRequest], Message]) -> None:
        assert config.draft is not None
        part, between_devices = DevicePart.NONE, None
        if not config.has_host_link:
            part = DevicePart.BULK if config.draft.link == "auto" else DevicePart.BODY  # as measured
            between_devices = stream()
        through_host = stream()
        self._verifier_end, self._drafter_end = (
            Channel(
                me=me, peer="the other end", host=through_host, first_bytes=None,
                device_part=part, device=between_devices, where=None if between_devices is None else device,
            )
            for me in ("verifier 0", "drafter 0")
        )  # fmt: skip
        self._draft = draft

    def send(self, message: Message, step: int) -> None:
        self._verifier_end.send(message, step)
        received = self._drafter_end.receive().message
        assert isinstance(received, DraftRequest)
        reply = self._draft(received)
        if received.is_answered:
            self._drafter_end.send(reply, step)

    def receive(self) -> Received:
        return self._verifier_end.receive()

    def heartbeat(self, step: int) -> None: ...


@dataclass
class Run:
    tokens: dict[int, list[int]]
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of prompt and output tokens
    num_steps: int = 0
    num_drafts: int = 0
    num_replays: int = 0
    num_calls: int = 0  # launches, copies and replays behind start-up
    waits: Counter[str] = field(default_factory=Counter)  # behind start-up
    untold: Counter[str] = field(default_factory=Counter)  # those that the rank's pulse is not told of


def run(config: EngineConfig, jobs: list[Submit]) -> Run:
    """Run all jobs at once on the models that worker processes would load for this config."""
    with simulated_cuda() if config.device == "cuda" else nullcontext() as cuda:
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        verifier, drafter = (Alone.of(config, rank, device) for rank in range(2))
        specs = read_specs(config)
        target, num_pages = verifier_worker.load(verifier, specs)
        assert config.draft is not None
        is_model = method_of(config.draft).is_model
        kernels = kernels_for(device if is_model else "cpu", config.kernels, config.enforce_eager)
        proposer = load_proposer(drafter, specs, kernels)
        max_depth = None if specs.draft is None else specs.draft.max_depth
        draft = DraftModel(proposer, make_tree_policy(config.draft.tree), max_depth=max_depth, kernels=kernels).draft
        if is_model:
            for request in warm_up_requests(config, proposer.width):
                draft(request)
        warm_up(target, config, num_pages)
        front, engine_end = socket.socketpair()
        with front, engine_end:
            link = Drafter(config, device, draft)
            engine = Engine(config, target, link, FrameSocket(engine_end), num_pages, UNPROFILED)  # type: ignore[arg-type]
            for job in jobs:
                front.sendall(encode(job))
            calls_before = cuda.num_calls if cuda else 0
            if cuda:
                cuda.waits.clear()
                cuda.untold.clear()
            made, frames, unfinished = Run({job.id: [] for job in jobs}), FrameDecoder(), len(jobs)
            while unfinished:
                engine._step()  # as `Engine.run` does
                made.num_steps += 1
                told = select.select([front], [], [], 0)[0]
                for frame in frames.feed(front.recv(1 << 20)) if told else ():
                    assert isinstance(frame, StepOutput)
                    for chunk in frame.chunks:
                        made.tokens[chunk.id] += chunk.tokens
                        made.scores.setdefault(chunk.id, []).extend(chunk.prompt_logprobs or chunk.logprobs or ())
                        unfinished -= chunk.finish_reason is not None
        made.num_drafts = engine._stats.num_drafts
        if cuda:
            made.waits, made.untold = Counter(cuda.waits), Counter(cuda.untold)
            made.num_replays = sum(graph.num_replays for graph in cuda.graphs)
            made.num_calls = cuda.num_calls - calls_before
    return made


def config_for(models: Path, method: str, tree: TreeConfig, **options: object) -> EngineConfig:
    path = str(models / method) if method != "ngram" else ""
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}
    return EngineConfig(
        model_path=str(models / "target"),
        device="cuda",
        max_model_len=96,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        num_pages=40,
        draft=DraftConfig(
            method={"peagle": "eagle3"}.get(method, method), model_path=path, placement="colocated", tree=tree, **lookup
        ),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


ROOT = Path(__file__).parents[2]
HANG_S = 4.0
DYNAMIC = TreeConfig(num_speculative_tokens=6, max_depth=3, max_children=2)
AUTO = replace(
    DYNAMIC, prune=PruneConfig(auto=True, prompt_lookup=False, simulated_costs=SimulatedCosts(step_ms=10, row_ms=0.01))
)
PRUNED = replace(DYNAMIC, prune=PruneConfig(min_prob=0.02, path_prob=0.001))
CHAIN = TreeConfig(kind="chain", num_speculative_tokens=3)
STATIC = TreeConfig(kind="static", num_speculative_tokens=5, static_paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
COUPLED = [
    SamplingSettings(temperature=0.0),
    SamplingSettings(seed=1),
    SamplingSettings(temperature=0.8, top_p=0.9, top_k=20, seed=2),
    SamplingSettings(seed=3, constraints=Constraints(repetition_penalty=1.2, presence_penalty=0.3)),
]
OTHERS = [
    SamplingSettings(seed=4, min_p=0.05, num_logprobs=2),
    SamplingSettings(seed=5, constraints=Constraints(logit_bias={3: 2.0}, bad_words=[[5], [7, 8]], min_tokens=4)),
]


ONCE = {"drafter.tree.frontier.columns"}
"""In each of these places the host waits once for the device."""


def jobs(sampling: list[SamplingSettings], *rules: str) -> list[Submit]:
    return [
        Submit(
            id=number,
            prompt=torch.randint(2, 96, (9 + 8 * number,), generator=torch.Generator().manual_seed(number)).tolist(),
            max_tokens=16,
            sampling=params,
            ignore_eos=True,
            speculation=Speculation(acceptance=rules[number % len(rules)]),
        )
        for number, params in enumerate(sampling)
    ]


def test_a_hybrids_steps_and_folds_are_replayed(models: Path) -> None:
    """Prompts in chunks, trees, the states that a prefix keeps, and seats that another request had."""
    checkpoints.write_hybrid(models / "hybrid")
    work = jobs([*COUPLED, SamplingSettings(temperature=0.0)], "coupled")
    work.append(replace(work[-1], id=5, prompt=work[-1].prompt + [7, 8]))
    config = replace(config_for(models, "ngram", CHAIN), model_path=str(models / "hybrid"), num_pages=60)
    on_device, on_cpu = run(config, work), run(replace(config, device="cpu"), work)
    assert on_device.tokens == on_cpu.tokens and on_device.num_steps == on_cpu.num_steps
    assert on_device.num_replays > 1.7 * on_device.num_steps, "a step, and mostly a fold before it"
    assert on_device.waits == {"verifier.target._draw": on_device.num_steps}


def test_long_chunks_of_prompts_run_without_graphs_beside_trees(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and head; the target's middle layer has a window. In float32, for tokens that do not part."""
    monkeypatch.setattr("workers.kernels.prompt_attention.TYPES", (torch.float32,))
    monkeypatch.setattr("workers.kernels.prompt_attention.FEWEST_ROWS", 8)
    monkeypatch.setattr("workers.kernels.prompt_attention.FEWEST_PAIRS", 8 * 8)
    taken, attend = Counter[tuple[int, bool]](), PromptPlan.attend

    def noting(plan: PromptPlan, q_NHd: torch.Tensor, *given: Any) -> torch.Tensor:
        taken[len(plan._chunks), plan._others is not None] += 1
        return attend(plan, q_NHd, *given)

    monkeypatch.setattr(PromptPlan, "attend", noting)
    config, work = replace(config_for(models, "eagle3", DYNAMIC), max_num_seqs=3), jobs(COUPLED * 2, "coupled")
    on_device = run(config, work)
    assert taken[1, True] and taken[2, True] and on_device.num_replays
    on_cpu = run(replace(config, device="cpu"), work)
    assert on_device.tokens == on_cpu.tokens and on_device.num_drafts == on_cpu.num_drafts
    assert on_device.waits.keys() <= {
        "verifier.target._draw",
        "drafter.tree.tree_graphs.__call__",
        "workers.comm.channel._send",
        *ONCE,
    }


def test_in_bfloat16_neither_drafts_nor_other_requests_change_a_batch_invariant_text(models: Path) -> None:
    """Nor its log-probabilities. The twins of the kernels do not show the order of sums, but which keys a row sees."""
    config = config_for(models, "eagle3", DYNAMIC, dtype="bfloat16", batch_invariant=True)
    config = replace(config, model_path=str(models / "unwindowed"), max_num_seqs=4)
    submitted = jobs([replace(sampling, num_logprobs=2) for sampling in COUPLED], "coupled")
    drafted = run(config, submitted)
    assert drafted.num_drafts and drafted.num_replays
    for job in submitted:
        plain = run(config, [replace(job, speculation=Speculation(enabled=False))])
        assert not plain.num_drafts and plain.tokens[job.id] == drafted.tokens[job.id]
        assert len(plain.scores[job.id]) == job.max_tokens and plain.scores[job.id] == drafted.scores[job.id]


@pytest.mark.parametrize("tree", [AUTO, CHAIN, STATIC, PRUNED], ids=["auto", "chain", "static", "thresholds"])
def test_tree_graphs_give_the_cpus_tokens_with_one_wait_per_side(
    models: Path, monkeypatch: pytest.MonkeyPatch, tree: TreeConfig
) -> None:
    """The changes of page tables are sent one by one, as those of large tables are."""
    monkeypatch.setattr("workers.kernels.triton_attention._SMALL_TABLE", 0)
    work = jobs(COUPLED, "coupled")
    # Whether lookup is tried depends on measured times.
    config = config_for(models, "eagle3", replace(tree, prune=replace(tree.prune, prompt_lookup=False)))
    on_device, on_cpu = run(config, work), run(replace(config, device="cpu"), work)
    assert on_device.tokens == on_cpu.tokens
    assert on_device.num_steps == on_cpu.num_steps and on_device.num_drafts == on_cpu.num_drafts > 20
    assert on_device.num_replays > 2 * on_device.num_steps, "target, what is fed, trees"
    drafts = on_device.waits["drafter.tree.tree_graphs.__call__"]
    assert on_device.waits == {
        "verifier.target._draw": on_device.num_steps,  # the tokens
        "drafter.tree.tree_graphs.__call__": drafts,  # the trees
        "workers.comm.channel._send": on_device.waits[
            "workers.comm.channel._send"
        ],  # features, colocated: by way of the host
        "drafter.tree.frontier.columns": 1,  # the vocabulary, for the first penalty
    }
    assert drafts <= on_device.waits["workers.comm.channel._send"] <= on_device.num_steps
    assert set(on_device.untold) <= ONCE


@pytest.mark.parametrize(("method", "tree"), [("dspark", AUTO), ("dspark", CHAIN), ("peagle", DYNAMIC)])
def test_heads_of_one_pass_grow_trees_in_graphs_with_the_cpus_tokens(
    models: Path, method: str, tree: TreeConfig
) -> None:
    work = jobs(COUPLED, "coupled")
    config = config_for(models, method, tree)
    on_device, on_cpu = run(config, work), run(replace(config, device="cpu"), work)
    assert on_device.tokens == on_cpu.tokens and on_device.num_drafts == on_cpu.num_drafts > 20
    places = {"verifier.target._draw", "drafter.tree.tree_graphs.__call__", "workers.comm.channel._send", *ONCE}
    assert set(on_device.waits) <= places, "the host waits for no level"
    assert on_device.waits["drafter.tree.tree_graphs.__call__"] > 10


@pytest.mark.parametrize(
    ("is_drafted", "is_eager", "order"),
    [
        (True, False, ["replay", "emit", "receive", "replay", "sample", "end"]),  # the first one is the drafter's
        (False, False, ["replay", "emit", "sample", "end"]),
        (False, True, ["emit", "launch", "sample", "end"]),
    ],
    ids=["drafts", "graphs", "eager"],
)
def test_a_steps_tokens_are_sent_while_the_next_step_is_computed(
    models: Path, monkeypatch: pytest.MonkeyPatch, is_drafted: bool, is_eager: bool, order: list[str]
) -> None:
    """While drafts grow, without drafts while the GPU computes, and before a forward that the host launches."""
    events: list[str] = []

    def note(event: str, owner: type, name: str, *, is_before: bool = True) -> None:
        real = getattr(owner, name)

        def noting(self: Any, *given: Any) -> Any:
            before = len(events)
            result = real(self, *given)
            events.insert(before if is_before else len(events), event)
            return result

        monkeypatch.setattr(owner, name, noting)

    note("emit", FrameSocket, "send")
    note("receive", Drafter, "receive")
    note("launch" if is_eager else "", Decoder, "forward")
    note("sample", Decoder, "logits")
    note("end", Target, "_draw", is_before=False)
    if not is_eager:
        note("replay", Graphs, "__call__")
    (job,) = jobs([SamplingSettings(temperature=0.0)], "coupled")
    config = config_for(models, "eagle3", CHAIN, enforce_eager=is_eager)
    run(config, [replace(job, speculation=Speculation(enabled=is_drafted))])
    steps = " ".join(events).split("end")[-6:-2]  # in which the request decodes, and goes on to do so
    assert [step.split() for step in steps] == [order[:-1]] * 4


@pytest.mark.parametrize(
    ("method", "tree", "options"),
    [
        pytest.param("eagle3", DYNAMIC, {}, marks=pytest.mark.full),
        ("draft_model", AUTO, {}),
        ("draft_model", DYNAMIC, {"enforce_eager": True}),
        pytest.param("eagle3", CHAIN, {"kernels": "torch"}, marks=pytest.mark.full),
        ("ngram", CHAIN, {}),
        ("eagle3", AUTO, {"kv_cache_dtype": "fp8"}),
        ("dspark", DYNAMIC, {}),
        pytest.param("peagle", AUTO, {}, marks=pytest.mark.full),  # one pass, as dspark
        pytest.param("draft_model", DYNAMIC, {"kv_cache_dtype": "fp8", "kernels": "torch"}, marks=pytest.mark.full),
    ],
    ids=[
        "eagle3",
        "draft-model-auto",
        "draft-model-eager",
        "torch-kernels",
        "ngram",
        "fp8-kv",
        "dspark",
        "peagle",
        "fp8-kv-torch-kernels",
    ],
)
def test_every_kind_of_request_gets_the_cpus_tokens(
    models: Path, method: str, tree: TreeConfig, options: dict[str, object]
) -> None:
    work = jobs(COUPLED + OTHERS, "coupled", "rejection", "rejection")
    config = config_for(models, method, tree, **options)
    on_device, on_cpu = run(config, work), run(replace(config, device="cpu", kernels="auto"), work)
    assert on_device.tokens == on_cpu.tokens and on_device.num_drafts == on_cpu.num_drafts > 10
    is_captured = not {"enforce_eager", "kernels"} & options.keys()
    assert (on_device.num_replays > on_device.num_steps // 2) is is_captured
    assert set(on_device.untold) <= ONCE, "a device that hangs is noticed wherever the host waits for it"


def test_prompts_are_scored_as_on_the_cpu(models: Path) -> None:
    work = [replace(job, num_prompt_logprobs=job.id) for job in jobs(COUPLED, "coupled")]
    config = config_for(models, "eagle3", DYNAMIC)
    on_device, on_cpu = run(config, work), run(replace(config, device="cpu"), work)
    assert on_device.tokens == on_cpu.tokens and on_device.num_replays > on_device.num_steps
    for job in work:
        mine, other = on_device.scores[job.id], on_cpu.scores[job.id]
        assert len(mine) == len(job.prompt) - 1
        assert [score.logprob for score in mine] == pytest.approx([score.logprob for score in other], abs=1e-4)
        assert [len(score.top) for score in mine] == [job.id] * len(mine)


def test_a_class_of_transformers_drafts_and_verifies_in_graphs(models: Path) -> None:
    work = jobs(COUPLED, "coupled")
    config = config_for(models, "draft_model", AUTO)
    assert config.draft is not None
    draft = replace(config.draft, model_path=str(models / "olmo2_draft"))
    config = replace(config, model_path=str(models / "olmo2"), draft=draft)
    on_device, on_cpu = run(config, work), run(replace(config, device="cpu"), work)
    assert on_device.tokens == on_cpu.tokens and on_device.num_drafts == on_cpu.num_drafts > 20
    assert on_device.num_replays > 2 * on_device.num_steps
    assert set(on_device.waits) <= {"verifier.target._draw", "drafter.tree.tree_graphs.__call__"}


@pytest.mark.parametrize("link", ["nccl", "auto"])
def test_sending_features_does_not_make_the_sender_wait(models: Path, link: str) -> None:
    """Over NCCL the receiver waits for what it reads; through the host it has that without a wait for the device."""
    config = config_for(models, "eagle3", DYNAMIC)
    assert config.draft is not None
    apart = replace(config, draft=replace(config.draft, placement="dedicated", link=link))
    work = jobs(COUPLED, "coupled")
    made = run(apart, work)
    assert made.tokens == run(replace(apart, device="cpu"), work).tokens
    assert made.waits["workers.comm.channel._send"] == 0
    assert (0 < made.waits["workers.comm.channel.receive"] <= 2 * made.num_steps) is (link == "nccl")


@pytest.mark.parametrize(
    ("tree", "tp", "draft_tp", "placement"),
    [
        (AUTO, 2, 1, "dedicated"),
        pytest.param(DYNAMIC, 2, 2, "dedicated", marks=pytest.mark.full),
        pytest.param(DYNAMIC, 2, 2, "colocated", marks=pytest.mark.full),
    ],
    ids=["2+1", "2+2", "2 shared"],
)
def test_split_models_give_the_cpus_tokens(
    models: Path, monkeypatch: pytest.MonkeyPatch, tree: TreeConfig, tp: int, draft_tp: int, placement: str
) -> None:
    """Start workers as on GPUs, with collectives in graphs; gloo replaces NCCL."""
    config = config_for(models, "eagle3", tree)
    assert config.draft is not None
    draft = replace(config.draft, tensor_parallel_size=draft_tp, placement=placement)  # type: ignore[arg-type]
    split = replace(config, tensor_parallel_size=tp, draft=draft, step_timeout_s=300.0)
    work = [
        GenerationJob(prompt=job.prompt, max_tokens=job.max_tokens, sampling=job.sampling)
        for job in jobs(COUPLED, "coupled")
    ]
    with Runner(replace(config, device="cpu")) as on_cpu:
        expected = [answer.tokens for answer in on_cpu.run(work, concurrency=2)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "support" / "simulated"), str(ROOT)]))
    with Runner(split) as on_devices:
        assert [answer.tokens for answer in on_devices.run(work, concurrency=2)] == expected
        assert on_devices.stats.num_drafts > 20


@pytest.mark.parametrize(
    ("hung", "named"), [([0, 1], "verifier"), ([2], "drafter 0")], ids=["collective", "tree graph"]
)
def test_a_device_that_stops_within_a_graph_is_noticed_in_time(
    models: Path, monkeypatch: pytest.MonkeyPatch, hung: list[int], named: str
) -> None:
    """The ranks whose collective does not end wait and spin, and NCCL's watchdog does not see replayed collectives."""
    config = config_for(models, "eagle3", AUTO, tensor_parallel_size=2, hang_timeout_s=HANG_S, step_timeout_s=300.0)
    assert config.draft is not None
    draft = replace(config.draft, fallback=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "support" / "simulated"), str(ROOT)]))

    async def main() -> None:
        engine = LocalEngine(replace(config, draft=draft))
        async with engine as client:
            submit = Submit(id=client.new_id(), prompt=[5] * 8, max_tokens=80, ignore_eos=True)
            waiting = asyncio.create_task(answered(client, submit))
            while client.stats.steps < 3:
                await asyncio.sleep(0.01)
            for rank in hung:
                os.kill(engine.pids[rank], signal.SIGUSR1)
            with pytest.raises(EngineDead):
                await asyncio.wait_for(waiting, 10 + 2 * HANG_S)
            assert client.dead is not None
            assert client.dead.startswith(named) and f"made no progress for {HANG_S:g} s and was killed" in client.dead

    asyncio.run(main())


async def answered(client: EngineClient, submit: Submit) -> int:
    return sum([len(chunk.tokens) async for chunk in client.submit(submit)])


def test_a_simulated_engine_runs_in_sixteen_bits(models: Path) -> None:
    """Rounding gives other tokens than on a CPU, but all types must fit together."""
    made = run(config_for(models, "eagle3", AUTO, dtype="bfloat16"), jobs(COUPLED + OTHERS, "coupled", "rejection"))
    assert all(len(tokens) == 16 for tokens in made.tokens.values()) and made.num_drafts > 20
