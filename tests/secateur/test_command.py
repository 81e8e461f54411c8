"""The command line reads vLLM's spellings, groups its help, and completes in a shell."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from secateur import cli, config
from secateur.batch_progress import BatchSummary
from secateur.cli import app
from secateur.cli.command import GROUPS
from secateur.cli.serving import HARDWARE_NAMES
from secateur.errors import ConfigError
from secateur.plan import HARDWARE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(monkeypatch):
    """What `secateur serve` would serve."""
    calls: list[config.EngineArgs] = []
    launch = types.ModuleType("cluster.serve.launch")
    launch.serve = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.serve.launch", launch)
    monkeypatch.setattr(config, "resolve_model", lambda name: name)
    monkeypatch.delenv("SECATEUR_API_KEY", raising=False)
    return calls


def serve(served, *args: str) -> config.EngineArgs:
    assert cli.main(["serve", "--port", "0", *args]) == 0
    return served.pop()


def test_every_option_that_there_is_not_is_named_in_one_error(served, capsys):
    foreign = ["--trust-remote-code", "--block-size", "16", "--rope-theta=1", "--max-model-lem", "5", "--zzz.a", "1"]
    assert cli.main(["serve", *foreign]) == 2 and not served
    told = capsys.readouterr().err
    for name in ("--trust-remote-code is", "--block-size is", "--rope-theta is", "--max-model-lem (did", "--zzz"):
        assert name in told


@pytest.mark.filterwarnings("default")
def test_flags_that_ask_for_what_is_so_in_any_case_are_left_out_with_a_warning(served, capsys):
    spelt = ["org/model", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-log-requests"]
    args = serve(served, *spelt, "--reasoning-parser", "qwen3")
    assert (args.model, args.tool_call_parser, args.reasoning_parser) == ("org/model", "hermes", "think")
    told = capsys.readouterr().err
    assert "warning: --enable-auto-tool-choice: it is always so" in told and "--disable-log-requests: requests" in told


@pytest.mark.parametrize("command", [[], ["serve"], ["complete"], ["batch", "run"], ["bench", "step"]])
def test_help_has_a_short_name(command, capsys):
    assert cli.main([*command, "-h"]) == 0
    assert "Usage: secateur" in capsys.readouterr().out


@pytest.mark.parametrize(
    "spelt",
    [
        ["--max_model_len", "32k"],
        ["--max-model-len=32k"],
        ["--max_model_len=32000"],
        ["--max-model-len", "32000"],
    ],
)
def test_options_may_have_underscores_and_units(served, spelt):
    assert serve(served, *spelt).max_model_len == 32_000


def test_only_names_change_and_values_stay(served):
    args = serve(served, "--served_model_name", "my_model", "--root_path=/a_b", "--api-key", "--odd_key")
    assert (args.served_model_name, args.root_path, args.api_key) == ("my_model", "/a_b", "--odd_key")


def test_a_model_may_have_several_names(served):
    spelt = [
        ["org/model", "--served-model-name", "a", "b", "--seed", "3"],
        ["--served-model-name", "a", "org/model", "--served-model-name=b"],
        ["org/model", "--served-model-name", '["a", "b"]'],
        ["org/model", "--served-model-name", "a,b"],
        ["--served-model-name=a, b", "org/model"],
    ]
    for args in (serve(served, *each) for each in spelt):
        assert (args.model, args.served_model_name, args.model_id) == ("org/model", ["a", "b"], "a")
    args = serve(served, "--served-model-name", "a", "org/model")
    assert (args.model, args.served_model_name, args.model_ids) == ("org/model", "a", ("a",))
    with pytest.raises(ConfigError, match="served_model_name: has a name twice"):
        config.EngineArgs.load({"served_model_name": ["a", "a"]})


@pytest.mark.parametrize("spelt", [["1", "8"], ["1,8"], ["1,", "8"], ["1, 8"]])
def test_numbers_are_listed_with_spaces_or_commas(spelt, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("secateur.cli.serving.service_part", lambda _: lambda _, request, **__: asked.append(request))
    assert cli.main(["plan", "--hardware", "h100", "--batch", *spelt, "--context", "100"]) == 0
    assert (asked[0].batches, asked[0].context) == ((1, 8), 100)


def test_services_are_listed_and_texts_to_stop_at_keep_their_commas(monkeypatch):
    calls = []
    monkeypatch.setattr("secateur.batch.run_batch", lambda *args, **options: calls.append(options) or BatchSummary())
    assert cli.main(["batch", "run", "in.jsonl", "-o", "out.jsonl", "--base-url", "http://a,http://b"]) == 0
    assert cli.main(["batch", "run", "in.jsonl", "-o", "out.jsonl", "--base-url", "http://a", "http://b"]) == 0
    assert [call["base_url"] for call in calls] == [["http://a", "http://b"]] * 2
    command = typer.main.get_command(app).commands["complete"]  # type: ignore[attr-defined]
    words = ["text", "--stop", "a, b", "--stop", "c"]
    assert command.make_context("complete", words).params["stop"] == ["a, b", "c"]


def test_a_model_may_be_named_by_an_option(served):
    assert serve(served, "--model", "org/model").model == "org/model"
    assert serve(served, "--model=org/model", "--dtype", "half").dtype == "float16"


def test_dotted_keys_are_a_speculative_config(served):
    keys = ["--speculative-config.method", "draft_model", "--speculative_config.model=org/small_model"]
    spec = serve(served, *keys, "-sc.num_speculative_tokens", "3").speculative_config
    assert (spec.method, spec.model, spec.num_speculative_tokens) == ("draft_model", "org/small_model", 3)


def test_a_dotted_key_changes_the_default_drafter(served):
    spec = serve(served, "--speculative-config.num-speculative-tokens", "3").speculative_config
    assert (spec.model, spec.num_speculative_tokens) == ("bundled:eagle3", 3)


def test_a_dotted_key_overrides_the_file(served, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text('speculative-config: \'{"model": "o/x", "num_speculative_tokens": 4}\'\nmax-model-len: 8k\n')
    args = serve(served, "--config", str(file), "--speculative-config.num_speculative_tokens", "5")
    assert (args.speculative_config.model, args.speculative_config.num_speculative_tokens) == ("o/x", 5)
    assert args.max_model_len == 8000
    other = serve(served, "--config", str(file), "-sc.model", "o/y").speculative_config
    assert (other.model, other.num_speculative_tokens) == ("o/y", 16)


def test_a_dotted_key_joins_the_json_and_must_agree_with_it(served, capsys):
    whole = json.dumps({"model": "o/x", "num_speculative_tokens": 4})
    assert serve(served, "-sc", whole, "-sc.speculative_tree", "chain").speculative_config.speculative_tree == "chain"
    assert cli.main(["serve", "-sc", whole, "-sc.num_speculative_tokens", "5"]) == 2
    assert (
        "--speculative-config.num_speculative_tokens: 5 contradicts num_speculative_tokens=4" in capsys.readouterr().err
    )


def test_a_list_of_a_dotted_key_grows(served, capsys):
    assert cli.main(["serve", "-sc.method", "draft_model", "-sc.model+", "a", "-sc.model+", "b,c"]) == 2
    assert "speculative_config.model: must be a valid string (got ['a', 'b', 'c'])" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--block_size", "16"], "--block-size is an option of vLLM that Secateur does not have: write --page-size"),
        (["-pp", "2"], "-pp is an option of vLLM"),
        (["-O3"], "CUDA graphs"),
        (["--trust-remote-code"], "code of a repository is never run"),
        (["--max-num-seq", "3"], "there is no option --max-num-seq (did you mean --max-num-seqs?)"),
        (["--zzz"], "there is no option --zzz"),
        (["--speculative-config.model"], "a value is missing"),
        (["--max-model-len.x", "3"], "--max-model-len holds no keys; only --speculative-config does"),
        (["-sc.model", "a", "-sc.model", "b"], "is given twice, as 'a' and 'b'"),
        (["--seed.x", "3"], "holds no keys"),
    ],
)
def test_wrong_options_say_what_to_write(served, args, says, capsys):
    assert cli.main(["serve", *args]) == 2
    told = capsys.readouterr().err
    assert says in told and "See `secateur serve --help`." in told and not served


def test_a_key_of_vllm_in_the_file_says_what_to_write(served, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text("no-enable-prefix-caching: true\nquantization: awq\n")
    assert cli.main(["serve", "--config", str(file)]) == 2
    assert "quantization: is a setting of vLLM that Secateur does not have" in capsys.readouterr().err
    file.write_text("no-enable-prefix-caching: true\nmodel: org/model\n")
    assert not serve(served, "--config", str(file)).enable_prefix_caching


def test_arguments_behind_two_dashes_are_no_options(capsys):
    assert cli.main(["complete", "--base-url", "http://127.0.0.1:9", "--max-tokens", "0", "--", "--block-size"]) == 2
    assert "max_tokens: 0 is only allowed with echo" in capsys.readouterr().err


def test_help_has_its_options_in_groups(capsys):
    assert cli.main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{title}:\n") for title in GROUPS if title != "Sampling"]
    assert places == sorted(places)
    model, speculation, limits, serving = places[2:]
    for option, start, end in (
        ("--dtype", model, speculation),
        ("--speculative-config", speculation, limits),
        ("--max-model-len", limits, serving),
        ("--api-key", serving, len(shown)),
    ):
        assert start < shown.index(f"{option} ", start) < end
    assert "speculative-config-keys" not in shown


def test_every_group_of_an_option_has_a_place():
    command = typer.main.get_command(app)
    commands, titles = [command], set()
    while commands:
        found = commands.pop()
        commands += getattr(found, "commands", {}).values()
        titles |= {getattr(param, "rich_help_panel", None) for param in found.params}
    assert titles - {None} <= set(GROUPS)


def test_the_hardware_in_the_help_is_what_the_planner_knows():
    assert set(HARDWARE_NAMES) == set(HARDWARE)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert "_SECATEUR_COMPLETE=complete_" + shell in shown and "secateur" in shown


@pytest.fixture
def completed(tmp_path):
    """Return what bash would offer for the last of some words."""
    command = tmp_path / "secateur"
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m secateur "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def complete(*words: str) -> list[str]:
        script = (
            'eval "$(secateur completion bash)"\n'
            f"COMP_WORDS=(secateur {' '.join(words)}); COMP_CWORD={len(words)}; _secateur_completion secateur\n"
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return complete


def test_bash_completes_commands_options_and_values(completed):
    assert completed("ben") == ["bench"]
    assert completed("serve", "--max-m") == ["--max-model-len"]
    assert completed("serve", "--dtype", "f") == ["float32", "float16", "float"]


COMMANDS = (
    ["serve"],
    ["plan"],
    ["complete"],
    ["chat"],
    ["top"],
    ["batch", "run"],
    ["bench", "step"],
    ["bench", "serve"],
)
HEAVY = {"torch", "ray", "httpx2", "rich", "yaml", "numpy", "transformers", "secateur.config", "secateur.responses"}


@pytest.mark.parametrize(
    ("args", "more"), [(["--help"], {"pydantic"}), *(([*command, "--help"], set()) for command in COMMANDS)]
)
def test_help_imports_no_heavy_module(args, more):
    """These modules take most of a second; typer itself imports pydantic where it reads options."""
    code = "import sys; from secateur.cli import main; main(sys.argv[1:]); print('\\n', *sys.modules, sep=' ')"
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.splitlines()[-1].split())
    assert "secateur.cli" in modules and modules & (HEAVY | more) == set()
