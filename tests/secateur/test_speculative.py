"""How a user sets speculation: accepted values, derived values, and error messages."""

import json
import warnings

import pytest

from secateur.config import EngineArgs
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
        ("deepseek-ai/dspark_qwen3_4b_block7", "dspark"),
        ("z-lab/Qwen3-4B-DFlash-b16", "dflash"),
        ("amazon/gpt-oss-20b-p-eagle", "eagle3"),
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


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, "dspark"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 5}}, "dflash"),
        ({"speculators_model_type": "dspark", "markov_rank": 64}, "dspark"),
        ({"speculators_model_type": "peagle", "mask_token_id": 5}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 5}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, "draft_model"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ([], "draft_model"),
    ],
)
def test_a_folder_tells_the_method_of_a_block_head(tmp_path, config, method):
    (folder := tmp_path / "head").mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert infer_method(str(folder)) == method


def test_the_files_in_a_folder_count_and_not_its_name(tmp_path):
    (folder := tmp_path / "eagle3-tests" / "eagle-head-dspark").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}))
    assert infer_method(str(folder)) == "draft_model"
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert infer_method(str(folder)) == "eagle"


def test_it_is_known_whether_the_method_was_written():
    assert SpeculativeConfig(model="a/b", method="eagle3").is_method_given
    inferred = SpeculativeConfig(model="a/b-eagle3")
    assert inferred.method == "eagle3" and not inferred.is_method_given
    assert not inferred.model_copy(update={"draft_placement": "colocated"}).is_method_given


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
