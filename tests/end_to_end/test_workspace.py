"""The memory that ranks count before they size their KV pools is what they then take, on the simulated device."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("runs on the simulated device", allow_module_level=True)

from drafter import methods
from drafter.drafter import Drafter, warm_up_requests
from drafter.tree.policy import make_tree_policy
from drafter.workspace import draft_workspace, widest_level
from tests.support import checkpoints
from tests.support.attention_cases import CHAIN as CHAIN_ROWS
from tests.support.attention_cases import Batch
from tests.support.engine_here import Alone
from tests.support.engines import CHAIN, DYNAMIC, STATIC
from tests.support.simulated_cuda import SimulatedCuda, simulated_cuda
from verifier import worker as verifier_worker
from verifier.warm_up import timed_forward
from verifier.workspace import target_workspace
from workers.config import DraftConfig, EngineConfig, PruneConfig, TreeConfig
from workers.kernels import fused
from workers.kernels.block_scaled import SPLIT_ROWS
from workers.kernels.select import kernels_for
from workers.models.draft_methods import read_specs
from workers.models.specs import Specs
from workers.settings import SamplingSettings
from workers.types import DraftRequest, SamplingBatch, ScoredRows
from workers.workspace import PassShape, Workspace, chunk_bytes, max_message_rows

torch.set_num_threads(1)
TREE = TreeConfig(num_speculative_tokens=6, max_depth=3, max_children=4, prune=PruneConfig(auto=True))
PLAIN = replace(TREE, prune=PruneConfig())
WIDE = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 2000}
"""Models whose vocabulary is much wider than their rows, as it is in all that are published."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    checkpoints.write_model(root / "target", "qwen3", num_hidden_layers=3, **WIDE)
    checkpoints.write_model(root / "draft_model", "llama", num_hidden_layers=1, seed=1, **WIDE)
    checkpoints.write_eagle3(root / "eagle3", draft_vocab_size=1500, **WIDE)
    checkpoints.write_eagle3(root / "peagle", parallel={"ptd_token_id": 2}, draft_vocab_size=1500, **WIDE)
    checkpoints.write_block(root / "dspark", style="specforge", draft_vocab_size=1500, **WIDE)
    return root


def config_of(models: Path, method: Any, tree: TreeConfig = TREE, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 96, "num_pages": 60}
    return EngineConfig(
        model_path=str(models / "target"),
        device="cuda",
        draft=DraftConfig(
            method={"peagle": "eagle3"}.get(method, method),
            model_path=str(models / method),
            placement="colocated",
            tree=tree,
        ),
        **settings | options,
    )


def world_of(config: EngineConfig, rank: int) -> Alone:
    return Alone.of(config, rank, torch.device("cuda", 0))


class Measured:
    """The most that was held beside what is there when it ends: within graphs, and outside of them."""

    def __init__(self, cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, *captures: tuple[Any, str]) -> None:
        self.captured = self.buffers = 0
        for module, name in captures:
            monkeypatch.setattr(module, name, self._counting(cuda, getattr(module, name)))
        self._cuda = cuda

    def _counting(self, cuda: SimulatedCuda, capture: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            gc.collect()  # what an earlier test has left
            before = cuda.memory.reset()
            graphs = capture(*args, **options)
            self.buffers += cuda.memory.num_bytes - before
            self.captured += cuda.memory.most_bytes - cuda.memory.num_bytes
            return graphs

        return counted

    def eager(self, *runs: Any) -> int:
        """Return the most that any of these calls holds beside what it leaves."""
        most = 0
        for run in runs:
            before = self._cuda.memory.reset()
            run()
            most = max(most, self._cuda.memory.most_bytes - before)
        return most


def assert_counted(counted: int, measured: int, most: float = 2.0) -> None:
    assert measured <= counted <= most * measured, f"{counted} bytes were counted, {measured} were taken"


@pytest.mark.parametrize(
    ("method", "dtype", "kv_cache_dtype"),
    [
        ("eagle3", "bfloat16", "auto"),
        ("eagle3", "bfloat16", "fp8"),
        ("draft_model", "float32", "auto"),
        ("hybrid", "bfloat16", "auto"),
    ],
)
def test_the_target_takes_what_was_counted(
    models: Path, monkeypatch: pytest.MonkeyPatch, method: str, dtype: str, kv_cache_dtype: str
) -> None:
    """hybrid: of the target; a model drafts for it."""
    config = config_of(models, method.replace("hybrid", "draft_model"), dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    if method == "hybrid":
        config = replace(config, model_path=str(checkpoints.write_hybrid(models / "hybrid", **WIDE)))
    specs = read_specs(config)
    with simulated_cuda() as cuda:
        measured = Measured(cuda, monkeypatch, (verifier_worker, "decoder_graphs"))
        target, num_pages = verifier_worker.load(world_of(config, 0), specs)
        most_trees = config.max_num_seqs * config.tree_rows
        settings = [SamplingSettings(temperature=0.0), SamplingSettings(top_p=0.9, num_logprobs=2, seed=1)]

        def step(sampling: SamplingSettings) -> None:
            timed_forward(target, config, num_pages, most_trees, sampling)
            target.states()

        many = torch.arange(64, dtype=torch.int32)
        scored = ScoredRows(row_S=many, token_S=many, num_top_S=many)
        rows_ND = torch.zeros(64, specs.target.hidden_size, dtype=getattr(torch, dtype), device="cuda")
        eager = measured.eager(
            *(partial(step, sampling) for sampling in settings), partial(target._score, rows_ND, scored)
        )
    reads_taps = method == "eagle3"
    counted = target_workspace(
        config, specs.target, num_taps=3 * reads_taps, state_width=3 * reads_taps * specs.target.hidden_size
    )
    assert_counted(counted.buffers, measured.buffers)
    # What attention leaves of pieces is bounded for all steps together: much, beside the narrow layers of this hybrid.
    assert_counted(counted.captured, measured.captured, most=2.5 if method == "hybrid" else 2.0)
    assert_counted(counted.eager, eager, most=4.0)  # scored prompts and earlier steps' states take the rest


def test_a_pass_without_graphs_takes_what_was_counted(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt through a model whose rows are as wide as its vocabulary."""
    checkpoints.write_model(models / "wide", "llama", hidden_size=128, intermediate_size=512, vocab_size=96)
    config = replace(
        config_of(models, "draft_model", enforce_eager=True), model_path=str(models / "wide"), draft=None,
        max_num_batched_tokens=128,
    )  # fmt: skip
    specs = read_specs(config)
    with simulated_cuda() as cuda:
        measured = Measured(cuda, monkeypatch)
        target, num_pages = verifier_worker.load(world_of(config, 0), specs)
        eager = measured.eager(lambda: timed_forward(target, config, num_pages, 128))
    counted = target_workspace(config, specs.target)
    assert counted.buffers == counted.captured == 0
    assert_counted(counted.eager, eager)


def test_a_long_chunk_takes_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values of its request side by side, from pages that lie apart, and the rows beside it."""
    rows, length, width = 256, 16_384, 256
    batch = Batch([(20, CHAIN_ROWS), (length - rows, rows)], 32)
    with simulated_cuda() as cuda:
        q = torch.zeros(len(batch.keys), 4, 64, dtype=torch.bfloat16, device="cuda")
        kv = torch.zeros(batch.num_slots, 2, 4, 64, dtype=torch.bfloat16, device="cuda")
        plan = fused.plan(batch.metadata, 32, kv_heads=4, dtype=q.dtype, device="cuda")
        taken = Measured(cuda, monkeypatch).eager(lambda: fused.tree_attention(q, kv, plan, 0.1))
    taken -= 2 * rows * length  # a mask and what it is made of, which flash attention on a GPU has not
    config = EngineConfig(model_path="", device="cuda", dtype="bfloat16", max_model_len=length)
    shape = PassShape(hidden=1, inner=1, queries=width, keys=width, head=64, first_input=1, kept=0)
    assert_counted(chunk_bytes(shape, config, len(batch.keys)), taken, most=1.1)
    for options in ({"dtype": "float32"}, {"batch_invariant": True}, {"device": "cpu"}, {"max_model_len": 4096}):
        assert not chunk_bytes(shape, replace(config, **options), len(batch.keys))  # type: ignore[arg-type]


@pytest.mark.parametrize("held", ["captured", "eager"])
def test_a_pass_of_many_rows_holds_its_largest_weight_dequantized(
    models: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """A prompt through a model in 8 bits whose weights are large beside its rows."""
    folder = models / f"float8 {held}"
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 96}
    checkpoints.write_model(folder, "llama", num_hidden_layers=1, **sizes)
    config = replace(
        config_of(models, "draft_model", enforce_eager=held == "eager", dtype="bfloat16"), model_path=str(folder),
        draft=None, max_num_batched_tokens=SPLIT_ROWS + 8, max_num_seqs=1,
    )  # fmt: skip
    plain = target_workspace(config, read_specs(config).target)
    checkpoints.quantize_fp8(folder, (128, 128))
    specs = read_specs(config)
    with simulated_cuda() as cuda:
        measured = Measured(cuda, monkeypatch, (verifier_worker, "decoder_graphs"))
        target, num_pages = verifier_worker.load(world_of(config, 0), specs)
        eager = measured.eager(lambda: timed_forward(target, config, num_pages, SPLIT_ROWS + 8))
        taken = eager if held == "eager" else measured.captured
    counted = target_workspace(config, specs.target)
    assert_counted(getattr(counted, held), taken)
    assert getattr(plain, held) < taken and getattr(counted, held) - getattr(plain, held) == 2 * (2 * 2048 * 1024)
    for few in (replace(config, max_num_batched_tokens=SPLIT_ROWS), replace(config, batch_invariant=True)):
        without = replace(few, model_path=str(models / "target"))
        assert target_workspace(few, specs.target) == target_workspace(without, specs.target)


def asked(config: EngineConfig, width: int, which: int, num_rows: int) -> DraftRequest:
    """Return a request for as many trees as there may be, which feeds `num_rows` rows; see `warm_up_requests`."""
    one, num = warm_up_requests(config, width)[which], config.max_num_seqs
    ends = torch.linspace(0, num_rows, num + 1).int()
    many = {
        name: value.repeat(num, *[1] * (value.dim() - 1))
        for name, value in ((field, getattr(one, field)) for field in one.__dataclass_fields__)
        if name.endswith("_B") and value is not None
    }
    params = [SamplingSettings(temperature=1.0, top_p=0.9, seed=seed) for seed in range(num)]
    return replace(
        one,
        **many,
        rules=one.rules.each(lambda column_B: column_B.repeat(num)),
        page_table_BP=torch.zeros(num, config.pages_for(config.max_model_len), dtype=torch.int32),
        offsets=ends,
        token_M=torch.zeros(num_rows, dtype=torch.int32),
        sampling=SamplingBatch.stack(params if which else [replace(each, temperature=0.0) for each in params]),
        features_MH=None if one.features_MH is None else one.features_MH.expand(num_rows, -1).contiguous(),
    )


def drafted(
    cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, config: EngineConfig, specs: Specs, which: int
) -> tuple[Workspace, Measured, int]:
    """Return what was counted, what graphs took, and the most that drafting took outside of them."""
    captures = [(methods, name) for name in ("decoder_graphs", "head_graphs")]
    captures += [(methods, name) for name in ("decoder_tree_graphs", "head_tree_graphs", "block_tree_graphs")]
    measured = Measured(cuda, monkeypatch, *captures)
    kernels = kernels_for(torch.device("cuda", 0), config.kernels, config.enforce_eager)
    assert config.draft is not None
    proposer: Any = methods.load_proposer(world_of(config, 1), specs, kernels)
    max_depth = specs.draft.max_depth if specs.draft else None
    drafter = Drafter(proposer, make_tree_policy(config.draft.tree), kernels=kernels, max_depth=max_depth)
    width = getattr(proposer, "width", 0)
    eager = measured.eager(
        *(
            lambda n=n: drafter.draft(asked(config, width, which, n))
            for n in (config.max_num_seqs, max_message_rows(config))
        )
    )
    return draft_workspace(config, specs.draft), measured, eager


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("eagle3", "bfloat16"), ("draft_model", "float32"), ("dspark", "bfloat16"), ("peagle", "float32")],
)
def test_a_drafter_takes_what_was_counted(
    models: Path, monkeypatch: pytest.MonkeyPatch, method: str, dtype: str
) -> None:
    config = config_of(models, method, dtype=dtype)
    monkeypatch.setattr("drafter.workspace.NOISE_BYTES", 0)
    with simulated_cuda() as cuda:
        counted, measured, eager = drafted(cuda, monkeypatch, config, read_specs(config), 1)
    assert_counted(counted.buffers, measured.buffers)
    assert_counted(counted.captured, measured.captured)
    assert eager <= counted.eager, "levels that no graph grows would take more"


@pytest.mark.parametrize("which", [0, 1, 2], ids=["greedy", "coupled", "sampled"])
@pytest.mark.parametrize("method", ["eagle3", "dspark", "peagle"])
def test_levels_without_a_graph_take_what_was_counted(
    models: Path, monkeypatch: pytest.MonkeyPatch, method: str, which: int
) -> None:
    config = config_of(models, method, PLAIN, enforce_eager=True)
    with simulated_cuda() as cuda:
        counted, _, eager = drafted(cuda, monkeypatch, config, read_specs(config), which)
    assert_counted(counted.eager, eager, most=4.2)  # not all nodes are of one level


def test_the_widest_level_of_a_tree() -> None:
    assert (widest_level(CHAIN), widest_level(STATIC), widest_level(DYNAMIC)) == (1, 3, 16)


def test_lookup_takes_nothing(models: Path) -> None:
    config = config_of(models, "ngram")
    assert draft_workspace(config, None).total == 0
