"""Arguments become a configuration, before any process starts."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import secateur
from cluster.convert import engine_config, resolve_devices, sampling_defaults, visible_gpus, with_tokenizer
from cluster.engine.rank_placement import num_bundles
from cluster.planner.report import run
from secateur.config import EngineArgs
from secateur.errors import ConfigError
from secateur.plan import PlanRequest
from secateur.token_tree import MAX_NODES
from tests.support import checkpoints
from workers.config import MAX_TREE_NODES, AcceptanceConfig, EngineConfig

BUNDLED = Path(secateur.__file__).parent / "bundled"


def args(**fields: Any) -> EngineArgs:
    return EngineArgs.load(fields)


def plan(given: EngineArgs) -> str:
    """Return the output of `secateur plan` without predictions."""
    return run(given, PlanRequest())


def draft_args(**spec: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "eagle3", "model": "bundled:eagle3", **spec}}


def test_the_bundled_default_is_a_target_and_its_head_on_cpu() -> None:
    engine = engine_config(args(), num_gpus=0)
    assert (engine.device, engine.dtype, engine.tensor_parallel_size) == ("cpu", "float32", 1)
    assert engine.draft is not None
    assert engine.draft.method == "eagle3"
    assert Path(engine.model_path) == BUNDLED / "target"
    assert engine.eos_token_ids
    assert EngineConfig.from_json(engine.to_json()) == engine


def test_every_setting_reaches_the_engine() -> None:
    same = {
        "max_model_len": 320, "max_num_seqs": 3, "max_num_batched_tokens": 96, "page_size": 32, "num_pages": 321,
        "enable_prefix_caching": False, "scheduling_policy": "priority", "kernels": "torch", "standby": False,
        "tensor_parallel_size": 2, "kv_cache_dtype": "fp8",
    }  # fmt: skip
    renamed = {"gpu_memory_utilization": ("memory_utilization", 0.5), "hang_timeout": ("hang_timeout_s", 7.0),
               "startup_timeout": ("startup_timeout_s", 77.0)}  # fmt: skip
    engine = engine_config(args(device="cpu", **same, **{name: value for name, (_, value) in renamed.items()}))
    wanted = same | dict(renamed.values())
    assert {name: getattr(engine, name) for name in wanted} == wanted


def test_every_setting_of_a_drafter_reaches_it() -> None:
    spec = draft_args(
        draft_placement="colocated", draft_link="host", draft_fallback=False,
        draft_tensor_parallel_size=1, num_speculative_tokens=9, speculative_tree_max_depth=4,
        speculative_tree_max_children=3, speculative_tree_prune="thresholds", speculative_tree_prune_min_prob=0.25,
        speculative_tree_prune_path_prob=0.125, acceptance="rejection", draft_sample_method="greedy",
    )  # fmt: skip
    draft = engine_config(args(device="cpu", **spec)).draft
    assert (draft.placement, draft.link, draft.fallback) == ("colocated", "host", False)
    assert (draft.tree.num_speculative_tokens, draft.tree.max_depth, draft.tree.max_children) == (9, 4, 3)
    assert (draft.tree.prune.auto, draft.tree.prune.min_prob, draft.tree.prune.path_prob) == (False, 0.25, 0.125)
    assert (draft.acceptance.kind, draft.acceptance.sample_method) == ("rejection", "greedy")


@pytest.mark.parametrize(("visible", "num"), [(None, 3), ("", 0), ("0, 2", 2), ("0,1,2,3", 3)])
def test_visible_devices_are_those_installed_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, num: int
) -> None:
    names = ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm")
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/dev", name) for name in names])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == num


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"device": "cpu", "kernels": "triton"}, "kernels: triton needs device 'cuda'; on CPU write torch"),
        ({"device": "cuda", "threads": 2}, "threads: applies on CPU only; leave it out"),
    ],
)
def test_what_does_not_go_with_the_device_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        engine_config(args(**fields))


def test_on_cuda_the_checkpoint_s_dtype_is_kept_if_it_has_16_bits(tmp_path: Path) -> None:
    assert engine_config(args(device="cuda")).dtype == "bfloat16"
    path = checkpoints.write_model(tmp_path, "llama")
    for given, used in (("float16", "float16"), ("float32", "bfloat16"), (None, "bfloat16")):
        checkpoints.edit_config(path, dtype=given)
        own = EngineArgs(model=str(path), device="cuda")
        assert engine_config(own).dtype == used
        assert engine_config(own.model_copy(update={"dtype": "float32"})).dtype == "float32"
        assert engine_config(own.model_copy(update={"device": "cpu"})).dtype == "float32"


def test_products_in_bfloat16_get_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.convert.num_cores", lambda: 9)

    def threads(**settings: Any) -> int:
        return engine_config(args(device="cpu", **settings)).threads

    assert threads(dtype="bfloat16") == threads(dtype="bfloat16", no_speculation=True) == 9
    assert threads(dtype="bfloat16", tensor_parallel_size=2) == 4
    assert threads(dtype="bfloat16", threads=3) == threads(threads=3) == 3
    assert threads(no_speculation=True) == threads() == 1
    monkeypatch.setattr("cluster.convert.num_cores", lambda: 1)
    assert threads(dtype="bfloat16", tensor_parallel_size=2) == 1
    with pytest.raises(ConfigError, match="threads: applies on CPU only; leave it out"):
        engine_config(args(device="cuda", threads=2))


def test_kernels_and_graphs_are_carried_over_and_triton_needs_cuda() -> None:
    engine = engine_config(args(device="cuda", kernels="torch", enforce_eager=True))
    assert (engine.kernels, engine.enforce_eager) == ("torch", True)
    assert (engine_config(args()).kernels, engine_config(args()).enforce_eager) == ("auto", False)
    with pytest.raises(ConfigError, match="kernels: triton needs device 'cuda'; on CPU write torch, or leave it out"):
        engine_config(args(device="cpu", kernels="triton"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "batch_invariant: is for bfloat16; write dtype bfloat16, or leave it out"),
        ({"device": "cuda", "kernels": "torch"}, "batch_invariant: needs Triton's kernels on device cuda"),
    ],
)
def test_invariance_is_for_bfloat16_and_own_kernels(options: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        engine_config(args(batch_invariant=True, **options))


def test_invariance_needs_a_processor_that_multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: True)
    assert engine_config(args(dtype="bfloat16", batch_invariant=True)).batch_invariant
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match="needs a processor that multiplies bfloat16"):
        engine_config(args(dtype="bfloat16", batch_invariant=True))


def test_the_dtype_of_the_kv_cache_is_carried_over() -> None:
    assert engine_config(args()).kv_cache_dtype == "auto"
    engine = engine_config(args(kv_cache_dtype="fp8"))
    assert engine.kv_cache_dtype == "fp8" and (engine.item_bytes, engine.kv_item_bytes) == (4, 1)
    assert EngineConfig.from_json(engine.to_json()) == engine


def test_max_model_len_defaults_to_the_model_s_and_may_not_exceed_it() -> None:
    limit = engine_config(args()).max_model_len
    assert engine_config(args(max_model_len=100)).max_model_len == 100
    with pytest.raises(ConfigError, match=f"max_model_len: {limit + 1} is more than the model's {limit}"):
        engine_config(args(max_model_len=limit + 1))


def test_pages_that_do_not_hold_a_request_of_the_model_s_own_length_are_refused() -> None:
    limit = engine_config(args()).max_model_len
    with pytest.raises(ConfigError, match=f"num_pages: 20 .* of max_model_len={limit}: write at least [0-9]+"):
        engine_config(args(num_pages=20))
    assert engine_config(args(num_pages=20, max_model_len=200)).num_pages == 20


@pytest.mark.parametrize("length", [2, 300])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("draft", [{"no_speculation": True}, draft_args(num_speculative_tokens=63)])
def test_validation_and_engine_agree_on_the_fewest_pages(length: int, page_size: int, draft: dict[str, Any]) -> None:
    given = {"max_model_len": length, "page_size": page_size, **draft}
    least = 1 + engine_config(args(**given)).pages_for(length)
    assert args(num_pages=least, **given).num_pages == least
    with pytest.raises(ConfigError, match=f"num_pages: .* at least {least}"):
        args(num_pages=least - 1, **given)


def test_a_tokenizer_s_own_end_of_text_ends_answers_too(tmp_path: Path) -> None:
    """Fine-tuning for chats often changes the tokenizer's end token alone."""
    taken = args(model=str(shutil.copytree(BUNDLED / "target", tmp_path / "model")), no_speculation=True)
    config = engine_config(taken)
    same, tokenizer = with_tokenizer(taken, config)
    assert same == replace(config, tokenizer_path=tokenizer.path), "the bundled model's files name its tokenizer's"
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"eos_token": "<|endoftext|>"', '"eos_token": "a"'))
    ended, tokenizer = with_tokenizer(taken, config)
    assert ended.eos_token_ids == (*config.eos_token_ids, *tokenizer.encode("a", add_special_tokens=False))


def test_a_model_without_a_tokenizer_is_an_error_before_the_start(tmp_path: Path) -> None:
    model = checkpoints.write_model(tmp_path, "qwen3")
    taken = args(model=str(model), no_speculation=True)
    named = f"tokenizer: none could be read from {re.escape(str(model))} .*; name a folder or a Hugging Face id"
    for written in (None, "{"):
        if written is not None:
            (model / "tokenizer.json").write_text(written)
        with pytest.raises(ConfigError, match=named):
            with_tokenizer(taken, engine_config(taken))
    taken = args(model=str(model), no_speculation=True, tokenizer=str(BUNDLED / "target"))
    with_tokenizer(taken, engine_config(taken))


def test_requests_are_sampled_as_the_model_s_generation_config_says(tmp_path: Path) -> None:
    model = checkpoints.write_model(tmp_path, "qwen3")
    written = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": None}
    (model / "generation_config.json").write_text(json.dumps(written))
    wanted = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert sampling_defaults(args(model=str(model)), str(model)) == wanted
    assert sampling_defaults(args(model=str(model), generation_config="none"), str(model)) == {}
    assert sampling_defaults(args(), engine_config(args()).model_path) == {}, "the bundled model says nothing"


def test_generation_config_s_values_are_a_request_s(tmp_path: Path) -> None:
    model = checkpoints.write_model(tmp_path, "qwen3")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "max_new_tokens": 512, "top_p": 1}')
    defaults = sampling_defaults(args(model=str(model)), str(model))
    assert defaults == {"temperature": 0.6, "top_p": 1.0, "max_tokens": 512}
    for written, told in (
        ('{"max_new_tokens": 0}', "max_new_tokens: must be greater"),
        ('{"temperature": "0.6"}', "temperature: must be a valid number"),
    ):
        (model / "generation_config.json").write_text(written)
        with pytest.raises(ConfigError, match=f"generation_config: .*{told}"):
            sampling_defaults(args(model=str(model)), str(model))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"temperature": 0.6', "generation_config.json is not valid JSON: "),
        ("[1, 2]", "generation_config.json holds no JSON object but a list"),
        ('{"eos_token_id": [1, "2"]}', "eos_token_id: '2' is no token id; write a number or a list of numbers"),
    ],
)
def test_a_generation_config_that_cannot_be_read_is_named(tmp_path: Path, written: str, told: str) -> None:
    model = checkpoints.write_model(tmp_path, "qwen3")
    (model / "generation_config.json").write_text(written)
    with pytest.raises(ConfigError, match=told):
        engine_config(args(model=str(model), no_speculation=True))


def test_an_invalid_generation_config_is_an_error_before_the_start(tmp_path: Path) -> None:
    model = checkpoints.write_model(tmp_path, "qwen3")
    (model / "generation_config.json").write_text('{"temperature": -1, "top_k": 20}')
    with pytest.raises(ConfigError, match=r"generation_config: .*temperature: .*; correct the file, or write none"):
        engine_config(args(model=str(model), no_speculation=True))
    engine_config(args(model=str(model), no_speculation=True, generation_config="none"))


def test_validation_and_engine_agree_on_the_largest_tree() -> None:
    assert MAX_NODES + 1 == MAX_TREE_NODES


def test_a_tree_is_carried_over() -> None:
    spec = draft_args(speculative_token_tree="[(0,), (1,), (0, 0)]", speculative_tree_prune_threshold=0.25)
    tree = engine_config(args(**spec)).draft.tree
    assert (tree.kind, tree.num_speculative_tokens, tree.max_depth) == ("static", 3, 2)
    assert tree.longest_path == 2
    assert tree.static_paths == ((0,), (1,), (0, 0))
    assert (tree.prune.min_prob, tree.prune.path_prob) == (0.25, 0.25)


def test_the_acceptance_rule_and_automatic_pruning_are_carried_over() -> None:
    spec = draft_args(
        acceptance="rejection",
        rejection_method="recursive",
        draft_sample_method="hybrid",
        draft_probs_min_temperature=0.5,
        speculative_tree_prune="auto",
        speculative_tree_prune_min_prob=0.1,
    )
    draft = engine_config(args(**spec)).draft
    assert draft.acceptance == AcceptanceConfig(
        kind="rejection", rejection_method="recursive", sample_method="hybrid", draft_probs=True, min_temperature=0.5
    )
    assert (draft.tree.prune.auto, draft.tree.prune.min_prob) == (True, 0.1)
    without = draft_args(acceptance="rejection", enable_draft_probs=False)
    assert engine_config(args(**without)).draft.acceptance.draft_probs is False
    assert not engine_config(args(**draft_args(speculative_tree_prune="off"))).draft.tree.prune.auto


def test_the_standby_process_can_be_switched_off() -> None:
    assert engine_config(args()).standby
    assert not engine_config(args(standby=False)).standby


def test_a_size_the_heads_do_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not fit"):
        engine_config(args(tensor_parallel_size=3, no_speculation=True))


@pytest.mark.parametrize("size", [2000, 2112])
def test_a_draft_model_of_another_vocabulary_size_needs_the_same_tokens(tmp_path: Path, size: int) -> None:
    sizes = f"the vocabularies of target and draft model have 2048 and {size} rows"
    folder = checkpoints.write_model(tmp_path, "llama", vocab_size=size)
    given = args(speculative_config={"method": "draft_model", "model": str(folder)})
    with pytest.raises(
        ConfigError, match=f"{sizes}, and .* has no tokenizer to compare; copy it there, or use a draft"
    ):
        engine_config(given)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / "target" / name, folder)
    assert engine_config(given).draft.model_path == str(folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    one, other = (next(entry for entry, id in vocab.items() if id == number) for number in (700, 701))
    vocab[one], vocab[other] = 701, 700
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as error:
        engine_config(given)
    assert f"{sizes}, and token 700 is {one!r} and {other!r}; use a draft model of the target's family" in str(
        error.value
    )


def test_ngram_lookup_needs_no_checkpoint_and_no_device() -> None:
    spec = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    engine = engine_config(args(device="cuda", speculative_config=spec), num_gpus=2)
    draft = engine.draft
    assert (draft.method, draft.model_path, draft.placement) == ("ngram", "", "colocated")
    assert (draft.prompt_lookup_min, draft.prompt_lookup_max) == (2, 4)
    assert num_bundles(engine) == 1
    assert EngineConfig.from_json(engine.to_json()) == engine
    text = plan(args(speculative_config=spec))
    assert "drafter  n-gram lookup, matches of 2 to 4 tokens" in text
    assert "0 B       4 B" in text


def test_an_eagle_head_is_checked_against_its_target(tmp_path: Path) -> None:
    target = str(checkpoints.write_model(tmp_path / "target", "llama"))
    head = checkpoints.write_eagle(tmp_path / "head")
    given = {"model": target, "speculative_config": {"method": "eagle", "model": str(head)}}
    assert engine_config(args(**given)).draft.model_path == str(head)
    assert f"{head} (eagle" in plan(args(**given))
    checkpoints.edit_config(head, hidden_size=32)
    with pytest.raises(ConfigError, match="a hidden size of 32, this one has 64"):
        engine_config(args(**given))


@pytest.mark.parametrize(("family", "layout"), [("qwen3", "qwen3"), ("qwen2", "mimo")])
def test_mtp_drafts_with_the_target_s_own_folder(tmp_path: Path, family: str, layout: str) -> None:
    model = str(checkpoints.add_mtp(checkpoints.write_model(tmp_path, family), layout))
    given = {"model": model, "speculative_config": {"method": "mtp"}}
    assert engine_config(args(**given)).draft.model_path == model
    assert f"{model} (mtp" in plan(args(**given))


def test_mtp_needs_a_target_with_prediction_layers() -> None:
    with pytest.raises(ConfigError, match=r"must natively support multi-token prediction.*num_nextn_predict_layers"):
        engine_config(args(speculative_config={"method": "mtp"}))


@pytest.mark.parametrize(("num", "says"), [(4, "4 must be divisible by n_predict=3"), (6, "only one, which is used")])
def test_a_chain_uses_every_prediction_layer_equally_often(tmp_path: Path, num: int, says: str) -> None:
    model = checkpoints.add_mtp(checkpoints.write_model(tmp_path, "qwen3"), "qwen3")
    checkpoints.edit_config(model, mtp_num_hidden_layers=3)
    spec = {"method": "mtp", "num_speculative_tokens": num, "speculative_tree": "chain"}
    with pytest.raises(ConfigError, match=says):
        engine_config(args(model=str(model), speculative_config=spec))


def test_an_unknown_folder_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        engine_config(args(model="/nowhere"))


@pytest.mark.parametrize(
    ("gpus", "placement"), [(None, "dedicated"), (3, "dedicated"), (4, "dedicated"), (2, "colocated")]
)
def test_a_drafter_gets_its_own_device_where_there_are_enough(gpus: int | None, placement: str) -> None:
    settled = resolve_devices(args(tensor_parallel_size=2, device="cuda", **draft_args()), num_gpus=gpus)
    assert settled.speculative_config.draft_placement == placement
    assert resolve_devices(settled, num_gpus=None) == settled


def test_too_few_devices_are_an_error_before_the_start() -> None:
    with pytest.raises(ConfigError, match="need 2 GPUs, 1 can be used"):
        resolve_devices(args(tensor_parallel_size=2, device="cuda", **draft_args()), num_gpus=1)
    with pytest.raises(ConfigError, match="write draft_placement='colocated'"):
        resolve_devices(args(device="cuda", **draft_args(draft_placement="dedicated")), num_gpus=1)


@pytest.mark.parametrize(
    ("size", "device", "gpus", "says"),
    [
        (4, "cuda", 1, "tensor_parallel_size=4 needs 4 GPUs, 1 can be used; write a smaller size or device='cpu'"),
        (4, "auto", 1, "needs 4 GPUs, 1 can be used"),
        (1, "cuda", 0, "tensor_parallel_size=1 needs 1 GPU, 0 can be used; write device='cpu'"),
    ],
)
def test_too_few_devices_are_an_error_without_a_drafter_too(size: int, device: str, gpus: int, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        resolve_devices(args(tensor_parallel_size=size, device=device, no_speculation=True), num_gpus=gpus)


def test_without_a_drafter_enough_or_unknown_devices_are_accepted() -> None:
    asked = args(tensor_parallel_size=4, device="cuda", no_speculation=True)
    assert [resolve_devices(asked, num_gpus=gpus) for gpus in (4, 8, None)] == 3 * [asked]
    assert resolve_devices(args(tensor_parallel_size=4, no_speculation=True), num_gpus=0).device == "cpu"


@pytest.mark.parametrize("draft_len", [None, 256])
def test_a_drafter_may_be_limited_to_the_length_of_the_model(draft_len: int | None) -> None:
    assert engine_config(args(max_model_len=256, **draft_args(max_model_len=draft_len))).max_model_len == 256


def test_a_drafter_that_stops_before_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config.max_model_len: .* stops at 255 of max_model_len=256"):
        engine_config(args(max_model_len=256, **draft_args(max_model_len=255)))
