"""vLLM's spellings of settings mean what they mean there, and its other settings name what replaces them."""

import re

import pytest

from secateur.config import AppArgs, EngineArgs
from secateur.errors import ConfigError
from secateur.flags import ENGINE_FLAGS, SERVER_FLAGS
from secateur.speculative import SpeculativeConfig
from secateur.vllm_names import ADVICE, SGLANG_ADVICE, SHORT_NAMES, SPECULATIVE_ADVICE, advice_about, read_count


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1.5M", 3 << 19),
        ("2m", 2_000_000),
        ("1G", 1 << 30),
        ("1t", 10**12),
        (" 8K ", 8192),
        ("-1", -1),
    ],
)
def test_a_count_may_have_a_unit(text, number):
    assert read_count(text) == number


@pytest.mark.parametrize("text", ["", "k", "1kk", "0.3K", "1.0001k", "1,000", "32 k", "1e3", "0x10", "1.5"])
def test_what_is_no_whole_number_is_an_error(text):
    with pytest.raises(ValueError, match="must be a whole number"):
        read_count(text)


def test_lengths_and_dtypes_are_read_as_in_vllm():
    args = EngineArgs.load({"max-model-len": "32K", "max_num_batched_tokens": "8k", "dtype": "half"})
    assert (args.max_model_len, args.max_num_batched_tokens, args.dtype) == (32_768, 8000, "float16")
    assert EngineArgs.load({"dtype": "float"}).dtype == "float32"
    assert EngineArgs(max_model_len=4096).max_model_len == 4096


@pytest.mark.parametrize(("given", "means"), [("auto", "auto"), ("fp8", "fp8"), ("fp8_e4m3", "fp8")])
def test_the_kv_cache_has_the_model_s_dtype_or_e4m3(given, means):
    assert EngineArgs.load({"kv-cache-dtype": given}).kv_cache_dtype == means
    assert advice_about("--kv-cache-dtype") is None and "fp8" in advice_about("--calculate-kv-scales")


@pytest.mark.parametrize("given", ["fp8_e5m2", "bfloat16", "int8", 8])
def test_other_formats_of_the_kv_cache_say_what_to_write(given):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: .*'auto'.*'fp8'"):
        EngineArgs.load({"kv_cache_dtype": given})


def test_a_length_of_auto_says_what_to_write():
    with pytest.raises(ConfigError, match="max_model_len: must be a number; leave it out"):
        EngineArgs.load({"max_model_len": "auto"})


@pytest.mark.parametrize(("given", "is_on"), [(True, False), (False, True)])
def test_a_negated_key_is_the_opposite(given, is_on):
    assert EngineArgs.load({"no-enable-prefix-caching": given}).enable_prefix_caching is is_on


def test_a_negated_key_may_not_contradict_the_key():
    with pytest.raises(ConfigError, match="no_enable_prefix_caching: contradicts enable_prefix_caching: true"):
        EngineArgs.load({"enable_prefix_caching": True, "no_enable_prefix_caching": True})
    with pytest.raises(ConfigError, match="no_seed"):
        EngineArgs.load({"no_seed": 3})


def test_json_text_is_an_object_or_a_list():
    text = '{"model": "x", "num-speculative-tokens": 3}'
    args = EngineArgs.load({"speculative_config": text, "allowed_origins": '["https://a.example"]'})
    assert args.speculative_config.num_speculative_tokens == 3
    assert args.allowed_origins == ["https://a.example"]


@pytest.mark.parametrize(
    ("text", "says"), [("{", "speculative_config: not JSON"), ("[1]", "speculative_config: must be a JSON object")]
)
def test_json_text_that_is_no_object_is_an_error(text, says):
    with pytest.raises(ConfigError, match=says):
        EngineArgs.load({"speculative_config": text})


@pytest.mark.parametrize("first", [True, False])
def test_a_dotted_key_is_a_key_of_the_object(first):
    keys = {"speculative_config.num-speculative-tokens": 3}
    whole = {"speculative_config": {"model": "x"}}
    args = EngineArgs.load({**keys, **whole} if first else {**whole, **keys})
    assert (args.speculative_config.model, args.speculative_config.num_speculative_tokens) == ("x", 3)


def test_a_dotted_key_may_not_contradict_the_object():
    whole = {"model": "x", "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match="contradicts speculative_config"):
        EngineArgs.load({"speculative_config": whole, "speculative_config.num_speculative_tokens": 3})


def test_spellings_hold_in_the_arguments_of_an_application():
    app = AppArgs.load({"engine_kwargs": {"max_model_len": "1K", "no_enable_prefix_caching": True}})
    assert (app.engine_args().max_model_len, app.engine_args().enable_prefix_caching) == (1024, False)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("--block-size", "--page-size"),
        ("block_size", "--page-size"),
        ("--pipeline-parallel-size", "tensor parallelism"),
        ("-pp", "tensor parallelism"),
        ("-O3", "--enforce-eager"),
        ("--no-enable-chunked-prefill", "max-num-batched-tokens"),
        ("--enable-chunked-prefill", "always"),
        ("--no-async-scheduling", "nothing to set"),
        ("--ssl-ciphers", "proxy"),
        ("--ssl-ca-certs", "proxy"),
        ("--otlp-traces-endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("--lora-dtype", "merge the adapter"),
        ("--mm-encoder-tp-mode", "text models"),
    ],
)
def test_a_setting_of_vllm_names_its_replacement(name, says):
    assert says in advice_about(name)


@pytest.mark.parametrize("name", ["--page-size", "--prt", "seed", "max_model_len", "--no-speculation", "--sort"])
def test_other_names_have_no_replacement(name):
    assert advice_about(name) is None


def test_no_replacement_hides_a_setting_of_ours():
    ours = {*EngineArgs.model_fields, *ENGINE_FLAGS, *SERVER_FLAGS}
    assert [name for name in ours if advice_about(name)] == []
    assert set(SHORT_NAMES.values()) <= set(ADVICE)


def test_every_option_that_a_replacement_names_exists():
    ours = {*EngineArgs.model_fields, *ENGINE_FLAGS, *SERVER_FLAGS, "log_level"}  # an option of commands, not a setting
    texts = [*ADVICE.values(), *SGLANG_ADVICE.values()]
    named = {flag for text in [*texts, *SPECULATIVE_ADVICE.values()] for flag in re.findall(r"--([a-z-]+)", text)}
    assert {flag.removeprefix("no-").replace("-", "_") for flag in named} <= ours
    assert not ADVICE.keys() & SGLANG_ADVICE.keys()
    keys = {key for text in texts for key in re.findall(r"write (\w+) .*in --speculative-config", text)}
    assert keys and keys <= set(SpeculativeConfig.model_fields)


def test_a_speculative_key_of_vllm_names_its_replacement():
    assert not SpeculativeConfig.model_fields.keys() & SPECULATIVE_ADVICE.keys()
    with pytest.raises(ConfigError) as told:
        EngineArgs.load({"speculative_config": {"model": "x", "disable_by_batch_size": 4, "revision": "main"}})
    assert "speculative_config.disable_by_batch_size: is a key of vLLM that Secateur does not have" in str(told.value)
    assert "speculative_config.revision" in str(told.value)


def test_a_key_of_vllm_is_an_error_that_names_its_replacement():
    with pytest.raises(ConfigError) as told:
        EngineArgs.load({"block_size": 16, "trust_remote_code": True, "max_num_seq": 3})
    assert "block_size: is a setting of vLLM that Secateur does not have: write --page-size" in str(told.value)
    assert "trust_remote_code: is a setting of vLLM" in str(told.value)
