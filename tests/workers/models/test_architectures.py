"""The transformers backend equals transformers itself, on one rank and on two.

The same claims as in test_model_parity.py and test_model_tp.py, for every class that a tiny configuration can build.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cluster.convert import engine_config
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from tests.support import checkpoints
from tests.support.engines import GenerationJob, Runner
from tests.support.forked import in_ranks
from tests.workers.models.test_model_parity import Chunk, PagedRun, oracle, oracle_logits, random_tokens, random_tree
from workers.config import DraftConfig, EngineConfig, TreeConfig
from workers.models.eagle3_format import default_tap_layers
from workers.models.fc_head_format import read_mtp_spec
from workers.models.layers import SINGLE, Runtime, TensorParallel
from workers.models.load import load_decoder
from workers.models.readers import read_spec
from workers.models.specs import check_parallel
from workers.models.transformers_model import TransformersDecoder
from workers.models.transformers_spec import TESTED

torch.set_num_threads(1)


def has_plan(model_type: str) -> bool:
    """Older versions of transformers lack some architectures, or their plans, or stack Aria's experts differently."""
    plan = getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None) if model_type in CONFIG_MAPPING else None
    return model_type in CONFIG_MAPPING and (model_type != "aria_text" or "packed_rowwise" in (plan or {}).values())


KNOWN = {name: entry for name, entry in checkpoints.ARCHITECTURES.items() if has_plan(entry[0])}

SPLIT = [
    "aria", "cohere (norms of heads)", "ernie-4.5-moe", "gemma", "gemma-2", "glm-4", "gpt-neox", "gpt-oss",
    "granite-moe", "granite-swa (sinks)", "mixtral", "nemotron", "olmo-2", "olmoe", "phi", "phi-3", "qwen2-moe",
    "qwen3-moe",
]  # fmt: skip
"""At least one for each way in which plans split. All of KNOWN pass, in minutes on a busy machine."""

TAPS = (0, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write every architecture's checkpoint to a folder of its name."""
    path = tmp_path_factory.mktemp("architectures")
    for name, (model_type, config) in KNOWN.items():
        checkpoints.write_model(path / name, model_type, **config)
    return path


def load(path: Path, tp: TensorParallel = SINGLE, tap_layers: tuple[int, ...] = ()) -> TransformersDecoder:
    decoder = load_decoder(path, read_spec(path), Runtime(tp=tp), tap_layers)
    assert isinstance(decoder, TransformersDecoder)
    return decoder


def taps(path: Path) -> tuple[int, ...]:
    """Return the tap layers: none for Gemma-3n, whose layers pass on four streams."""
    return TAPS if path.name != "gemma-3n" else ()


def assert_close(actual: Tensor, expected: Tensor, scale: float | Tensor) -> None:
    """Compare within 1e-4 of the standard deviation, because models scale logits and features by 0.1 to 20."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 1e-4 * scale


def test_a_class_without_a_plan_runs_on_one_rank_only(folder: Path) -> None:
    check_parallel(read_spec(folder / "opt"), 1)
    with pytest.raises(ValueError, match="tensor_parallel_size 2 does not fit a opt model: it runs on one rank only"):
        check_parallel(read_spec(folder / "opt"), 2)


def test_the_architectures_called_tested_are_those_below() -> None:
    assert {model_type for model_type, _ in checkpoints.ARCHITECTURES.values()} == TESTED


def test_a_model_without_a_single_residual_stream_gives_no_features(folder: Path) -> None:
    with pytest.raises(ValueError, match="Gemma3nForCausalLM has no single residual stream"):
        load(folder / "gemma-3n", tap_layers=TAPS)


def test_gemma_3n_with_sparse_activations_is_not_split(folder: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size 2 does not fit a gemma3n_text model"):
        check_parallel(read_spec(folder / "gemma-3n"), 2)


@pytest.mark.parametrize("name", KNOWN)
def test_logits_of_prompts_trees_and_chunks_equal_transformers(folder: Path, name: str) -> None:
    rng = random.Random(0)
    model, decoder = oracle(folder / name), load(folder / name, tap_layers=taps(folder / name))
    first, second = random_tokens(21, seed=1), random_tokens(12, seed=2)
    run = PagedRun(decoder, num_requests=3, pages_each=12, seed=3)

    logits, hidden = run.forward([None, Chunk(first, 0), None])
    with torch.no_grad():
        expected = model(torch.tensor([first]), output_hidden_states=True)
    scale = expected.logits.std()
    assert scale > 0.05, "logits too flat to tell models apart"
    assert_close(logits[1], expected.logits[0], scale)
    if decoder.tap_layers:
        states = torch.cat([expected.hidden_states[tap][0] for tap in TAPS], dim=-1)
        assert hidden.taps_N3D is not None
        assert_close(hidden.taps_N3D, states, states.std())

    run.forward([Chunk(second[:5], 0), None, None])
    tree = random_tree(rng, 8, len(first), 96)
    logits, _ = run.forward([Chunk(second[5:], 5), tree, None])
    assert_close(logits[0], oracle_logits(model, second)[5:], scale)
    for row, path in enumerate(tree.paths):
        sequence = first + [tree.tokens[r] for r in path]
        assert_close(logits[1][row], oracle_logits(model, sequence)[-1], scale)


def whole_logits(path: Path, tp: TensorParallel) -> dict[str, Tensor]:
    """Compute logits and taps of a prompt and of a tree after it."""
    decoder = load(path, tp=tp, tap_layers=taps(path))
    run = PagedRun(decoder, seed=4)
    prompt = random_tokens(19, seed=5)
    results = {}
    for kind, part in (("prompt", Chunk(prompt, 0)), ("tree", random_tree(random.Random(6), 7, len(prompt), 96))):
        (logits,), hidden = run.forward([part])
        results[f"{kind} logits"] = logits
        if hidden.taps_N3D is not None:
            results[f"{kind} taps"] = hidden.taps_N3D
        shard, (start, end) = decoder.logits(hidden.final_ND), decoder.vocab_range
        assert torch.equal(shard[:, : end - start], logits[:, start:end])
        assert torch.isinf(shard[:, end - start :]).all()
    return results


def split_worker(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    tp = TensorParallel(rank, size, dist.group.WORLD)
    results = {name: whole_logits(folder / name, tp) for name in SPLIT if name in KNOWN}
    torch.save(results, folder / f"result-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_split_models_equal_the_whole(folder: Path) -> None:
    """Two ranks: Gemma's one key-value head is replicated, experts' 7 groups of 8 inner columns split unevenly."""
    in_ranks(split_worker, 2, 2, folder)
    results = [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(2)]
    for name in filter(KNOWN.__contains__, SPLIT):
        for kind, expected in whole_logits(folder / name, SINGLE).items():
            for result in results:
                difference = (result[name][kind] - expected).abs().max()
                assert difference < 1e-4 * expected.std(), (name, kind, float(difference))


def test_ranks_hold_only_their_share(folder: Path) -> None:
    """Each rank has a part of gate and up, of each expert, and of the vocabulary."""
    for rank in (0, 1):
        mixtral = load(folder / "mixtral", tp=TensorParallel(rank, 2))._base.layers[0]
        assert mixtral.mlp.experts.gate_up_proj.shape == (4, (48, 64)[rank], 64)
        assert mixtral.mlp.experts.down_proj.shape == (4, 64, (24, 32)[rank])
        assert mixtral.mlp.gate.weight.shape == (4, 64)
        assert mixtral.self_attn.k_proj.weight.shape == (16, 64)
        phi = load(folder / "phi-3", tp=TensorParallel(rank, 2))
        assert phi._base.layers[0].mlp.gate_up_proj.weight.shape == (96, 64)
        assert phi._head.lm_head.weight.shape == (49 - rank, 64)
        assert (phi.heads.num_kv_heads, phi.new_kv_pool(4).data.shape[3]) == (4, 4), "Phi-3's attention stays whole"
        phi_1 = load(folder / "phi", tp=TensorParallel(rank, 2))._base.layers[0]
        assert phi_1.mlp.fc1.weight.shape == (48, 64)
        assert (phi_1.mlp.fc2.bias == 0).all() == (rank == 1), "the sum's bias is added once"
        gemma = load(folder / "gemma", tp=TensorParallel(rank, 2))
        assert gemma.heads.num_kv_heads == 1
        assert gemma._head.lm_head.weight.data_ptr() == gemma._base.embed_tokens.weight[48 * rank].data_ptr()


def test_taps_of_one_layer_are_its_features_side_by_side(tmp_path: Path) -> None:
    """EAGLE-3's three layers coincide in part in targets of few layers."""
    path = checkpoints.write_model(tmp_path, "phi3", pad_token_id=0, num_hidden_layers=5)
    tokens = random_tokens(10)
    with torch.no_grad():
        states = oracle(path)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    run = PagedRun(load(path, tap_layers=default_tap_layers(5)))
    for start, end in ((0, 6), (6, 10)):
        _, hidden = run.forward([Chunk(tokens[start:end], start)])
        assert hidden.taps_N3D is not None
        expected = torch.cat([states[2][0, start:end]] * 3, dim=-1)
        assert_close(hidden.taps_N3D, expected, expected.std())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_vision_checkpoint_is_served(tmp_path: Path, prefix: str) -> None:
    config = {"tie_word_embeddings": True, "head_dim": 16, "sliding_window": 7}
    plain = checkpoints.write_model(tmp_path / "text", "gemma3_text", **config)
    path = checkpoints.write_multimodal(tmp_path / "both", prefix, sliding_window=7)
    tokens = random_tokens(20)
    expected = oracle_logits(oracle(plain), tokens)
    (logits,), _ = PagedRun(load(path)).forward([Chunk(tokens, 0)])
    assert_close(logits, expected, expected.std())
    checkpoints.edit_weights(path, add={f"{prefix}layers.7.mlp.up_proj.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"unknown tensors: .*layers.7.mlp"):
        load(path)


@pytest.mark.parametrize("is_other", [False, True])
def test_a_tied_model_uses_a_stored_head_that_is_not_its_embedding(tmp_path: Path, is_other: bool) -> None:
    model_type, config = checkpoints.ARCHITECTURES["gemma-2"]
    path = checkpoints.write_model(tmp_path, model_type, **config)
    head = load_file(path / "model.safetensors")["model.embed_tokens.weight"].flip(0 if is_other else ())
    checkpoints.edit_weights(path, add={"lm_head.weight": head.clone()})
    tokens = random_tokens(20)
    expected = oracle_logits(oracle(path), tokens)
    decoder = load(path)
    (logits,), _ = PagedRun(decoder).forward([Chunk(tokens, 0)])
    assert_close(logits, expected, expected.std())
    addresses = {decoder._head.lm_head.weight.data_ptr(), decoder._base.embed_tokens.weight.data_ptr()}
    assert len(addresses) == 1 + is_other


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("gptj", {}, "'GPTJForCausalLM'.*its attention is not one that can be replaced"),
        ("bloom", {}, "'BloomForCausalLM'.*needs more than attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "layers of type conv"),
        ("mamba", {}, "'MambaForCausalLM'.*layers of type linear_attention"),
        ("llama4_text", {}, "'Llama4ForCausalLM'.*layers of type chunked_attention"),
        ("deepseek_v2", {}, "'DeepseekV2ForCausalLM'.*latent attention"),
        ("minicpm3", {}, "'MiniCPM3ForCausalLM'.*latent attention .layers.*kv_a_proj"),
        ("longcat_flash", {}, "'LongcatFlashForCausalLM'.*(latent attention|moe_identity_expert)"),
        ("gemma4_text", {}, "'Gemma4ForCausalLM'.*layers of different"),
        (
            "gemma4_text",
            {"global_head_dim": 256, "num_kv_shared_layers": 0},
            "'Gemma4ForCausalLM'.*head needs more than",
        ),
        ("roberta", {"is_decoder": True}, "'RobertaForCausalLM'.*counted from the padding token"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "'Gemma3ForCausalLM'.*(looks ahead|neither causal)"),
    ],
)
def test_unsupported_features_are_an_error_with_their_name(
    tmp_path: Path, model_type: str, config: dict[str, Any], message: str
) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    settings = CONFIG_MAPPING[model_type](**config).to_dict()
    name = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]].__name__
    (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": [name]}, default=str))
    with pytest.raises(ValueError, match=message):
        read_spec(tmp_path)


def test_unsupported_models_are_an_error_before_a_process_starts(tmp_path: Path) -> None:
    """Read the configuration as `secateur serve` and `plan` do."""
    config = CONFIG_MAPPING["mamba"]().to_dict() | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ConfigError, match="'MambaForCausalLM' is not supported: layers of type linear_attention"):
        engine_config(EngineArgs(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForSequenceClassification"]}, "does not generate text"),
        ({"architectures": ["NovelForCausalLM"], "model_type": "novel"}, "'NovelForCausalLM'.*cannot read"),
    ],
)
def test_unknown_architectures_are_an_error_with_their_name(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    raw = json.loads((folder / "mixtral" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "auto_map", "message"),
    [
        ("novel", "AutoConfig", "does not know model type 'novel', and Python code from a checkpoint is not run"),
        (
            "glm4v_text",
            "AutoModelForCausalLM",
            "transformers cannot build it",
        ),  # has a configuration, but no ForCausalLM
    ],
)
def test_code_from_a_checkpoint_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, auto_map: str, message: str
) -> None:
    """transformers would ask at the terminal, and run it on "y"."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    (tmp_path / "novel.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {"architectures": ["NovelForCausalLM"], "model_type": model_type, "auto_map": {auto_map: "novel.Novel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_spec(tmp_path)
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_prediction_layers_that_the_class_skips_are_refused_as_such(tmp_path: Path) -> None:
    model_type, config = checkpoints.ARCHITECTURES["hy-v3"]
    path = checkpoints.write_model(tmp_path, model_type, **config, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"method 'mtp'.*prediction layers of a hy_v3 model are not implemented"):
        read_mtp_spec(path, read_spec(path))


def test_missing_misshapen_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, "qwen3_moe", **checkpoints.ARCHITECTURES["qwen3-moe"][1])
    checkpoints.edit_weights(path, add={"model.layers.0.self_attn.q_proj.bias": torch.ones(128)})
    with pytest.raises(ValueError, match=r"unknown tensors: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(path)
    checkpoints.edit_weights(path, remove=("model.layers.0.self_attn.q_proj.bias",))
    load(path)
    up = "model.layers.1.mlp.experts.3.up_proj.weight"
    checkpoints.edit_weights(path, add={up: torch.ones(56, 60)}, remove=(up,))
    with pytest.raises(ValueError, match=rf"{up}' is \(56, 60\), the model expects \(56, 64\)"):
        load(path)
    checkpoints.edit_weights(path, remove=(up,))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj' needs 4 experts, found \[3, 4\]"):
        load(path)
    checkpoints.edit_weights(path, remove=("model.norm.weight",))
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.gate_up_proj' needs|'model.norm.weight' is missing"):
        load(path)


def test_gpt_oss_with_an_eagle3_head_generates_what_transformers_generates(folder: Path, tmp_path: Path) -> None:
    """Windows of 7 and sinks under trees, with the target on two ranks."""
    head = checkpoints.write_eagle3(tmp_path / "head", style="speculators")
    draft = DraftConfig(
        method="eagle3", model_path=str(head), placement="colocated", tree=TreeConfig(num_speculative_tokens=12)
    )
    config = EngineConfig(
        model_path=str(folder / "gpt-oss"), draft=draft, tensor_parallel_size=2, max_model_len=128, max_num_seqs=4,
        step_timeout_s=120.0,
    )  # fmt: skip
    prompts = [random_tokens(12, seed=seed) for seed in (1, 2)]
    with Runner(config) as runner:
        answers = runner.run([GenerationJob(prompt=prompt, max_tokens=24) for prompt in prompts], concurrency=2)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = oracle(folder / "gpt-oss").generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert answer.tokens == expected[0, len(prompt) :].tolist()


@pytest.fixture
def runner(folder: Path) -> Iterator[Runner]:
    draft = DraftConfig(
        method="ngram",
        model_path="",
        prompt_lookup_min=1,
        prompt_lookup_max=3,
        placement="colocated",
        tree=TreeConfig(num_speculative_tokens=8, max_depth=4, max_children=4),
    )
    config = EngineConfig(
        model_path=str(folder / "qwen3-moe"), draft=draft, max_model_len=128, max_num_seqs=4, step_timeout_s=120.0
    )
    with Runner(config) as runner:
        yield runner


def test_an_engine_generates_what_transformers_generates(runner: Runner) -> None:
    prompts = [random_tokens(5, seed=seed) * 4 for seed in (1, 2, 3)]
    answers = runner.run([GenerationJob(prompt=prompt, max_tokens=40) for prompt in prompts], concurrency=3)
    generate = partial(
        oracle(Path(runner.config.model_path)).generate,
        max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = generate(ids, attention_mask=torch.ones_like(ids))[0, len(prompt) :]
        assert answer.tokens == expected.tolist()
    assert sum(answer.stats.num_accepted_tokens for answer in answers) > 20
