"""The command line: errors before anything starts, and precedence of flags, file and defaults."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from secateur import cli
from secateur.client import Client
from secateur.config import EngineArgs
from secateur.environment import report
from secateur.errors import ConfigError
from secateur.flags import ENGINE_FLAGS, SERVER_FLAGS, engine_args_from
from secateur.responses import CompletionChunk

ROOT = Path(__file__).parents[2]


def run(*args: str) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key != "SECATEUR_API_KEY"}
    command = [sys.executable, "-m", "secateur", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, env=env)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_an_invalid_draft_tp_is_an_error_with_the_valid_values():
    spec = {"method": "eagle3", "model": "x", "num_speculative_tokens": 8, "draft_tensor_parallel_size": 3}
    done = run("serve", "--tensor-parallel-size", "4", "--speculative-config", json.dumps(spec))
    assert done.returncode == 2 and done.stdout == ""
    assert "draft_tensor_parallel_size=3, tensor_parallel_size=4): use 1 or 4" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_service_with_several_fronts_needs_no_ray_and_none_is_for_a_cluster(cluster, monkeypatch, capsys):
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(signal, "pause", lambda: signal.raise_signal(signal.SIGTERM))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        assert cli.main(["serve", "-asc", "2"]) == 0
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
    [(name, args)] = cluster
    assert name == "local_service" and args.api_server_count == 2
    assert "serves secateur-bundled at http://local/v1" in capsys.readouterr().out
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert cli.main(["serve", "--api-server-count", "2"]) == 2
    assert "set num_replicas" in capsys.readouterr().err and len(cluster) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-sc", '{"num_speculative_tokens": 3}'], "was provided but without speculative model."),
        (["-sc", '{"model": "x", "num_spec_tokens": 3}'], "did you mean 'num_speculative_tokens'?"),
        (["-sc", '{"model": "x", "tensor_parallel_size": 1}'], "draft_tensor_parallel_size"),
        (["-sc", '{"model": "x", "speculative_token_tree": "[(0, 0)]"}'], "has no parent"),
        (["-sc", "{"], "not JSON"),
        (["-sc", "[1]"], "must be a JSON object"),
        (["-sc", '{"model": "x"}', "--no-speculation"], "contradicts speculative_config"),
        (["-tp", "0"], "tensor_parallel_size: must be greater than or equal to 1"),
        (["--speculative-tree-prune-threshold", "2"], "speculative_tree_prune_threshold: must be less than or equal"),
        (
            ["--speculative-tree-prune-threshold", "0.2", "--speculative-tree-prune-min-prob", "0.1"],
            "0.1 contradicts speculative_tree_prune_threshold=0.2",
        ),
        (
            ["-sc", '{"model":"x","speculative-tree-prune-min-prob":0.3}', "--speculative-tree-prune-min-prob", "0.1"],
            "0.1 contradicts speculative_tree_prune_min_prob=0.3 in --speculative-config",
        ),
        (["--no-speculation", "--speculative-tree-prune-min-prob", "0.1"], "contradicts --no-speculation"),
        (["org/model", "--speculative-tree-prune-min-prob", "0.1"], "nothing drafts"),
        (["--config", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["/nowhere/model"], "no model at /nowhere/model"),
        (["bundled:targt"], "did you mean 'bundled:target'?"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_wrong_setting_is_one_message_and_exit_code_2(command, args, says, capsys):
    assert cli.main([command, *args]) == 2
    shown = capsys.readouterr()
    assert says in shown.err and shown.err.startswith("secateur: error: ") and shown.out == ""


@pytest.mark.parametrize(
    "args", [["serve", "--prt", "1"], ["serve", "--dtype", "int8"], ["batch", "run"], ["frobnicate"]]
)
def test_wrong_usage_is_exit_code_2(args, capsys):
    assert cli.main(args) == 2
    assert re.search("secateur: error: .*\nSee `secateur.* --help`", capsys.readouterr().err)


def test_a_missing_ray_names_the_extra(cluster, monkeypatch, capsys):
    class NoRay:
        def find_spec(self, name, path=None, target=None):
            if name == "cluster.serve.launch":
                raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.delitem(sys.modules, "cluster.serve.launch")
    monkeypatch.setattr(sys, "meta_path", [NoRay(), *sys.meta_path])
    assert cli.main(["serve"]) == 1
    told = capsys.readouterr().err
    assert re.search(r"needs 'ray', which is not installed: pip install (-e )?'\S+\[serve\]'\n", told)


# -- settings --------------------------------------------------------------------------------------------------------


def test_serve_passes_validated_arguments(cluster):
    flags = ["-tp", "2", "--device", "cpu", "--dtype", "float32", "--seed", "7", "--port", "0", "--max-num-seqs", "8"]
    assert cli.main(["serve", "org/model", *flags, "-sc", '{"model": "x", "draft_tensor_parallel_size": 2}']) == 0
    [(name, args)] = cluster
    assert name == "serve"
    assert (args.model, args.tensor_parallel_size, args.device, args.dtype) == ("org/model", 2, "cpu", "float32")
    assert (args.seed, args.port, args.max_num_seqs) == (7, 0, 8)
    assert args.speculative_config is not None and args.speculative_config.draft_tensor_parallel_size == 2


def test_serve_alone_is_the_bundled_model(cluster):
    assert cli.main(["serve"]) == 0
    args = cluster[0][1]
    assert args.model == "bundled:target" and args.speculative_config.method == "eagle3"


def test_plan_prints_what_the_planner_says(cluster, capsys):
    assert cli.main(["plan"]) == 0
    assert capsys.readouterr().out == "plan of bundled:target\n"


def test_the_key_is_read_from_the_environment(cluster, monkeypatch):
    monkeypatch.setenv("SECATEUR_API_KEY", "from-env")
    cli.main(["serve"])
    cli.main(["serve", "--api-key", "given"])
    assert [args.api_key for _, args in cluster] == ["from-env", "given"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--allowed-origins", "https://a.example", "--allowed-origins", "https://b.example"],
        ["--allowed-origins", '["https://a.example", "https://b.example"]'],  # vLLM's way
    ],
)
def test_origins_are_a_repeated_flag_or_a_json_list(cluster, flags, tmp_path):
    assert cli.main(["serve", *flags, "--allow-credentials", "--root-path", "/llm"]) == 0
    (tmp_path / "config.yaml").write_text("allowed_origins: [https://a.example, https://b.example]\nroot_path: /llm\n")
    assert cli.main(["serve", "--config", str(tmp_path / "config.yaml")]) == 0
    assert [args.allowed_origins for _, args in cluster] == [["https://a.example", "https://b.example"]] * 2
    assert [(args.allow_credentials, args.root_path) for _, args in cluster] == [(True, "/llm"), (False, "/llm")]


@pytest.mark.parametrize("given", ["[1]", "https://a.example/x"])
def test_a_wrong_origin_is_an_error_before_the_start(cluster, given, capsys):
    assert cli.main(["serve", "--allowed-origins", given]) != 0
    assert "allowed_origins" in capsys.readouterr().err and not cluster


def test_a_key_file_is_checked_before_the_start(cluster, monkeypatch, tmp_path, capsys):
    file = tmp_path / "keys"
    monkeypatch.setenv("SECATEUR_API_KEY", "from-env")
    monkeypatch.chdir(tmp_path)
    for text, complaint in (
        (None, f"cannot read {file}"),
        ("\n", f"{file} holds no key"),
        ("a: b", f"line 1 of {file} has spaces"),
    ):
        if text is not None:
            file.write_text(text)
        assert cli.main(["serve", "--api-key-file", "keys"]) != 0
        assert complaint in capsys.readouterr().err
    file.write_text("a\nb\n")
    assert cli.main(["serve", "--api-key-file", "keys"]) == 0
    (tmp_path / "config.yaml").write_text(f"api_key_file: {file}")
    assert cli.main(["serve", "--config", "config.yaml"]) == 0
    # The environment's key is for those who name neither.
    assert [(args.api_key, args.api_key_file) for _, args in cluster] == [(None, str(file))] * 2
    assert cli.main(["serve", "--api-key-file", "keys", "--api-key", "x"]) != 0
    assert "api_key_file: contradicts api_key" in capsys.readouterr().err


def test_the_batch_folder_is_checked_before_the_start(cluster, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        assert cli.main(["serve", "--batch-dir", folder]) != 0
        assert f"batch_dir: {tmp_path / 'file'} is a file; name a folder" in capsys.readouterr().err
    assert cli.main(["serve", "--batch-dir", "new/folder"]) == 0
    [(_, args)] = cluster
    assert args.batch_dir == str(tmp_path / "new" / "folder") and not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(cluster, capsys):
    assert cli.main(["serve", "-sc", '{"model": "o/x", "enable_draft_probs": true}']) == 0
    assert capsys.readouterr().err.startswith("secateur: warning: enable_draft_probs has no effect")


@pytest.mark.filterwarnings("default")
def test_a_warning_of_the_client_is_one_line_too(monkeypatch, capsys):
    def answer(*_args, **_options):
        warnings.warn("the service ignored x", stacklevel=2)
        yield CompletionChunk(id="", created=0, model="m", choices=[])

    monkeypatch.setattr(Client, "stream_complete", answer)
    cli.main(["complete", "abc", "--base-url", "http://there"])
    assert "secateur: warning: the service ignored x\n" in capsys.readouterr().err


def test_every_engine_argument_has_its_flag():
    assert (ENGINE_FLAGS.keys() | SERVER_FLAGS.keys()) >= EngineArgs.model_fields.keys() - {"model"}


def test_pruning_flags_alone_prune_the_bundled_head():
    spec = engine_args_from({"speculative_tree_prune_min_prob": 0.1}).speculative_config
    assert spec is not None and spec.model == "bundled:eagle3"
    assert (spec.speculative_tree_prune, spec.speculative_tree_prune_min_prob) == ("thresholds", 0.1)


def test_pruning_flags_join_the_speculative_config_flag():
    flags = {"speculative_config": '{"model": "x"}', "speculative_tree_prune_threshold": 0.2}
    spec = engine_args_from(flags).speculative_config
    assert spec is not None and spec.model == "x"
    assert (spec.speculative_tree_prune_min_prob, spec.speculative_tree_prune_path_prob) == (0.2, 0.2)


@pytest.fixture
def config_file(tmp_path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(
        "model: org/model\nmax-num-seqs: 8\nseed: 1\n"
        "speculative-config: {model: x, speculative_tree_prune_threshold: 0.3, num_speculative_tokens: 4}\n"
    )
    return path


def test_flags_override_the_file(config_file):
    args = engine_args_from({"config": config_file, "seed": 2})
    assert (args.model, args.max_num_seqs, args.seed) == ("org/model", 8, 2)


def test_a_pruning_flag_overrides_the_files_threshold(config_file):
    spec = engine_args_from({"config": config_file, "speculative_tree_prune_path_prob": 0.1}).speculative_config
    assert spec is not None and spec.num_speculative_tokens == 4
    assert (spec.speculative_tree_prune_min_prob, spec.speculative_tree_prune_path_prob) == (0.3, 0.1)


def test_prefix_caching_is_on_unless_it_is_switched_off():
    given = [engine_args_from(flags) for flags in ({}, {"enable_prefix_caching": False})]
    assert [args.enable_prefix_caching for args in given] == [True, False]


def test_no_speculation_overrides_the_files_drafter(config_file):
    assert engine_args_from({"config": config_file, "no_speculation": True}).speculative_config is None


def test_an_unknown_key_in_the_file_is_refused(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("max_num_seq: 8\n")
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        engine_args_from({"config": path})


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_log_level_holds_here_and_in_new_processes(level, cluster, monkeypatch):
    monkeypatch.setenv("SECATEUR_LOG_LEVEL", "info")
    ours = [logging.getLogger(name) for name in ("cluster", "secateur")]
    before = [logger.level for logger in ours]
    try:
        assert cli.main(["serve", "--log-level", level]) == 0
        assert {logging.getLevelName(logger.level).lower() for logger in ours} == {level}
        assert os.environ["SECATEUR_LOG_LEVEL"] == level
        code = "import logging; from workers.logs import log_as; log_as('x'); print(logging.root.level)"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert int(done.stdout) == getattr(logging, level.upper())
    finally:
        for logger, old in zip(ours, before, strict=True):
            logger.setLevel(old)


def test_env_shows_the_machine_and_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/models")
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["env", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)
    assert list(sections) == ["versions", "system", "gpus", "ray", "settings"]
    assert sections["settings"]["HF_TOKEN"] == "(set)" and sections["settings"]["HF_HOME"] == "/models"
    assert "hf_secret" not in text and all(f"{title}:" in text for title in sections)
    assert sections["versions"]["torch"][0].isdigit()


def test_env_imports_nothing_that_it_reports_on():
    code = "import sys; from secateur.cli import main; main(['env']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert {"torch", "ray", "transformers"}.isdisjoint(done.stdout.splitlines()[-1].split())


def test_env_lists_the_gpus_that_nvidia_smi_lists(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, 81559 MiB, 4 MiB, 9.0, 580.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shown = "NVIDIA H100 80GB HBM3, 81559 MiB, 4 MiB used, compute capability 9.0, driver 580.1"
    assert report()["gpus"] == {"0": shown}
    tool.write_text("#!/bin/sh\necho no devices were found; exit 6\n")
    assert report()["gpus"] == {"nvidia-smi": "failed: no devices were found"}


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip()
    for command in (["serve"], ["plan"], ["complete"], ["chat"], ["batch", "run"]):
        assert cli.main([*command, "--help"]) == 0
        assert "Example: secateur " + " ".join(command) in capsys.readouterr().out
