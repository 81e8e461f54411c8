"""The command line: errors before anything starts, precedence of flags, file and defaults, streaming."""

import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import types
import warnings
from dataclasses import asdict
from pathlib import Path

import httpx2
import pytest

from secateur import cli, config
from secateur.batch_progress import BatchSummary
from secateur.cli.trees import draw_tree
from secateur.client import Client
from secateur.config import EngineArgs
from secateur.environment import report
from secateur.errors import ConfigError
from secateur.flags import ENGINE_FLAGS, SERVER_FLAGS, engine_args_from
from secateur.responses import (
    SSE_DONE,
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    CompletionChoice,
    CompletionChunk,
    CompletionResponse,
    SpeculativeStats,
    SpeculativeTree,
    TreeNode,
    TreeToken,
    Usage,
)

ROOT = Path(__file__).parents[2]


def run(*args: str) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key != "SECATEUR_API_KEY"}
    command = [sys.executable, "-m", "secateur", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, env=env)


@pytest.fixture
def cluster(monkeypatch):
    """A stand-in for the cluster package: `calls` holds what the commands passed."""
    calls: list[tuple[str, EngineArgs]] = []

    @contextlib.contextmanager
    def local_service(args, *, shows_progress):
        calls.append(("local_service", args))
        yield "http://local"

    app = types.ModuleType("cluster.serve.launch")
    app.serve = lambda args: calls.append(("serve", args))  # type: ignore[attr-defined]
    service = types.ModuleType("cluster.local_service")
    service.local_service = local_service  # type: ignore[attr-defined]
    report = types.ModuleType("cluster.planner.report")
    report.run = lambda args, request, **_: f"plan of {args.model}"  # type: ignore[attr-defined]
    package = types.ModuleType("cluster")
    package.__path__ = [str(ROOT / "cluster")]  # what is not replaced is the real one's
    monkeypatch.setitem(sys.modules, "cluster", package)
    monkeypatch.setitem(sys.modules, "cluster.serve.launch", app)
    monkeypatch.setitem(sys.modules, "cluster.local_service", service)
    monkeypatch.setitem(sys.modules, "cluster.planner", types.ModuleType("cluster.planner"))
    monkeypatch.setitem(sys.modules, "cluster.planner.report", report)
    monkeypatch.setattr(config, "resolve_model", lambda name: name)
    monkeypatch.delenv("SECATEUR_API_KEY", raising=False)
    return calls


@pytest.fixture
def service(monkeypatch):
    """Every Client talks to this: it answers in two chunks, or whole, with statistics, and remembers the bodies."""
    bodies: list[dict] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        bodies.append(body)
        counts = SpeculativeStats(num_drafts=2, num_draft_tokens=9, num_pruned=2, num_verified=7, num_accepted_tokens=3)
        stats = {"usage": Usage.of(2, 4), "speculative": counts}
        if not body["stream"]:
            if request.url.path == "/v1/completions":
                whole = CompletionResponse(model="m", choices=[CompletionChoice(text="hello")], **stats)
            else:
                message = AssistantMessage(content="hi")
                whole = ChatCompletionResponse(model="m", choices=[ChatChoice(message=message)], **stats)
            return httpx2.Response(200, text=whole.model_dump_json())
        if request.url.path == "/v1/completions":
            chunks = [CompletionChunk(model="m", choices=[CompletionChoice(text=text)]) for text in ("he", "llo")]
            chunks[0].choices[0].speculative_trees = [TREE] if body.get("return_speculative_trees") else None
            chunks.append(CompletionChunk(model="m", choices=[], **stats))
        else:
            deltas = [ChatDelta(role="assistant"), ChatDelta(content="hi")]
            chunks = [ChatCompletionChunk(model="m", choices=[ChatChunkChoice(delta=delta)]) for delta in deltas]
            chunks[1].choices[0].speculative_trees = [TREE] if body.get("return_speculative_trees") else None
            chunks.append(ChatCompletionChunk(model="m", choices=[], **stats))
        return httpx2.Response(200, text="".join(chunk.sse() for chunk in chunks) + SSE_DONE)

    opened = Client.__init__
    transport = httpx2.MockTransport(answer)
    monkeypatch.setattr(Client, "__init__", lambda self, *a, **kw: opened(self, *a, transport=transport, **kw))
    return bodies


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


# -- complete, chat, batch -------------------------------------------------------------------------------------------


def test_complete_streams_to_stdout_and_statistics_to_stderr(service, capsys):
    args = ["complete", "abc", "--base-url", "http://there", "--max-tokens", "4", "--seed", "1", "--stats"]
    assert cli.main(args) == 0
    shown = capsys.readouterr()
    assert shown.out == "hello\n"
    assert "4 tokens in" in shown.err and "acceptance length 2.50" in shown.err
    assert "9 tokens drafted, 7 verified, 3 accepted in 2 steps" in shown.err
    assert service[0]["max_tokens"] == 4 and service[0]["seed"] == 1 and service[0]["return_speculative_stats"] is True


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_penalties_are_sent_as_typed_and_nothing_else_is(command, service):
    flags = ["--presence-penalty", "0.5", "--frequency-penalty", "-1", "--repetition-penalty", "1.1", "--top-p", "0.9"]
    assert cli.main([command, "abc", "--base-url", "http://there", *flags]) == 0
    body = {key: value for key, value in service[0].items() if key not in ("prompt", "messages", "stream")}
    assert body == {"presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 1.1, "top_p": 0.9}


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_stop_strings_and_top_k_are_sent(command, service):
    flags = ["--stop", "\n", "--stop", "2.5", "--top-k", "5"]
    assert cli.main([command, "abc", "--base-url", "http://there", *flags]) == 0
    assert (service[0]["stop"], service[0]["top_k"]) == (["\n", "2.5"], 5)
    assert cli.main([command, "abc", "--base-url", "http://there", "--top-k", "-2"]) == 2
    assert cli.main([command, "abc", "--base-url", "http://there", "--stop", ""]) == 2
    assert len(service) == 1


def pipe(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


@pytest.mark.parametrize("command", ["complete", "chat"])
@pytest.mark.parametrize("text", ["def f(", "a\n\nb\n", "a\r\nb\rc\u2028é 😀\n", ""])
def test_a_dash_reads_the_prompt_from_standard_input_as_it_is(command, text, service, monkeypatch, capsys):
    pipe(monkeypatch, text.encode())
    assert cli.main([command, "-", "--base-url", "http://there"]) == 0
    [body] = service
    assert (body["prompt"] if command == "complete" else body["messages"][0]["content"]) == text
    assert capsys.readouterr().out == ("hello\n" if command == "complete" else "hi\n")


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_invalid_text_on_standard_input_is_reported_before_the_start(command, service, cluster, monkeypatch, capsys):
    pipe(monkeypatch, b"caf\xe9")
    assert cli.main([command, "-"]) == 2
    assert "standard input is not UTF-8 text" in capsys.readouterr().err
    assert service == [] and cluster == []


def test_a_closed_standard_input_is_an_error(service, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)  # as Python has it after `<&-`
    assert cli.main(["complete", "-", "--base-url", "http://there"]) == 2
    assert "standard input is closed" in capsys.readouterr().err and service == []


@pytest.mark.parametrize("paths", [["-", "-o", "out.jsonl"], ["in.jsonl", "-o", "-"]])
def test_a_batch_needs_files(paths, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["batch", "run", *paths]) == 2
    assert "-: a batch reads its input twice and resumes from its output; name files" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "kind"), [("complete", CompletionResponse), ("chat", ChatCompletionResponse)])
def test_json_is_the_whole_answer_on_one_line(command, kind, service, capsys):
    assert cli.main([command, "abc", "--base-url", "http://there", "--json"]) == 0
    shown = capsys.readouterr()
    answer = kind.model_validate_json(shown.out)
    assert answer.text == ("hello" if command == "complete" else "hi") and answer.usage.completion_tokens == 4
    assert shown.out.count("\n") == 1 and shown.err == ""
    [body] = service
    assert body["stream"] is False and "stream_options" not in body and "return_speculative_stats" not in body


def test_json_may_have_statistics_too(service, capsys):
    assert cli.main(["complete", "abc", "--base-url", "http://there", "--json", "--stats"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["speculative"]["num_drafts"] == 2 and "4 tokens in" in shown.err
    assert service[0]["return_speculative_stats"] is True and "stream_options" not in service[0]


def test_a_conversation_in_json_is_a_line_per_answer(service, monkeypatch, capsys):
    pipe(monkeypatch, b"first\n\nsecond\n")
    assert cli.main(["chat", "--base-url", "http://there", "--json"]) == 0
    lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert [ChatCompletionResponse.model_validate_json(text).text for text in lines] == ["hi", "hi"]
    assert [turn["content"] for turn in service[1]["messages"]] == ["first", "hi", "second"]


def test_complete_without_a_url_starts_a_service(service, cluster, capsys):
    assert cli.main(["complete", "abc", "--no-speculation"]) == 0
    [(name, args)] = cluster
    assert name == "local_service" and args.port == 0 and args.speculative_config is None
    assert capsys.readouterr().out == "hello\n" and "model" not in service[0]


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_running_service_at_the_default_address_is_asked_first(command, service, cluster, monkeypatch, capsys):
    asked = []

    def get(url, **options):
        asked.append(url)
        return httpx2.Response(200)

    monkeypatch.setattr(httpx2, "get", get)
    assert cli.main([command, "abc"]) == 0
    assert asked == ["http://127.0.0.1:8000/health"] and not cluster
    assert capsys.readouterr().err == "secateur: asking the service at http://127.0.0.1:8000\n"
    # Flags of an engine, and a model, say what to start.
    assert cli.main([command, "abc", "--no-speculation"]) == cli.main([command, "abc", "--model", "org/m"]) == 0
    assert len(asked) == 1 and [args.model for _, args in cluster] == ["bundled:target", "org/m"]


@pytest.mark.parametrize("answer", [httpx2.Response(503), httpx2.ConnectError("refused")])
def test_without_a_running_service_an_engine_is_started(answer, service, cluster, monkeypatch, capsys):
    def get(url, **options):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(httpx2, "get", get)
    assert cli.main(["complete", "abc"]) == 0
    assert [name for name, _ in cluster] == ["local_service"]
    assert "no service at http://127.0.0.1:8000; starting an engine for this command" in capsys.readouterr().err


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


TREE = SpeculativeTree(
    nodes=[
        TreeNode(parent=None, depth=0, token_id=1, text="\n", draft_prob=None, weight=1.0, status="root"),
        TreeNode(parent=0, depth=1, token_id=2, text=" a", draft_prob=0.5, weight=0.6, status="accepted"),
        TreeNode(parent=0, depth=1, token_id=3, text=" b", draft_prob=0.25, weight=0.2, status="rejected"),
        TreeNode(
            parent=1, depth=2, token_id=4, text="\x1b[31m", draft_prob=0.125, weight=0.1, status="pruned",
            pruned_by="min_prob",
        ),
        TreeNode(
            parent=2, depth=2, token_id=None, text=None, draft_prob=None, weight=None, status="pruned",
            pruned_by="path_prob",
        ),
    ],
    tokens=[
        TreeToken(token_id=2, text=" a", origin="accepted", depth=1),
        TreeToken(token_id=5, text="\n", origin="bonus", depth=2),
    ],
    draft_ms=1.25,
    verify_ms=2.5,
)  # fmt: skip
DRAWN = r"""step 1: ' a' '\n'  (1 accepted, draft 1.2 ms, verify 2.5 ms)
'\n'                                        root
├─ ' a'                                     accepted            q 0.500
│  └─ '\x1b[31m'                            pruned: min_prob    q 0.125
└─ ' b'                                     rejected            q 0.250
   └─ (not drafted)                         pruned: path_prob

"""


@pytest.mark.parametrize(("command", "text"), [("complete", "hello"), ("chat", "hi")])
def test_trees_are_drawn_as_they_come_and_the_text_follows(command, text, service, capsys):
    """Plain where the output is no terminal; what a model wrote is escaped."""
    assert cli.main([command, "abc", "--base-url", "http://there", "--show-trees"]) == 0
    assert capsys.readouterr().out == f"{DRAWN}{text}\n"
    assert service[0]["return_speculative_trees"] is True and "stream_options" not in service[0]


def test_each_status_has_its_colour_on_a_terminal():
    heading, root, accepted, pruned, rejected, undrafted = draw_tree(TREE, 1)
    starts = [line[: line.index("m") + 1] for line in (accepted, rejected, pruned, undrafted)]
    assert starts == ["\x1b[32m", "\x1b[31m", "\x1b[90m", "\x1b[90m"]
    assert "\x1b[1m" in heading and not root.startswith("\x1b[3")


def test_trees_may_be_part_of_the_json(service):
    assert cli.main(["complete", "abc", "--base-url", "http://there", "--show-trees", "--json"]) == 0
    assert service[0]["return_speculative_trees"] is True and service[0]["stream"] is False


def test_engine_flags_with_a_url_are_an_error(capsys):
    assert cli.main(["complete", "abc", "--base-url", "http://there", "-tp", "2"]) == 2
    assert "--tensor-parallel-size" in capsys.readouterr().err


def test_chat_answers_one_message(service, capsys):
    assert cli.main(["chat", "hello", "--base-url", "http://there", "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "hi\n"
    assert [turn["role"] for turn in service[0]["messages"]] == ["system", "user"]


def test_a_conversation_remembers_its_turns(service, monkeypatch, capsys):
    typed = iter(["first", "", "second"])

    def read(_: str = "") -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert cli.main(["chat", "--base-url", "http://there"]) == 0
    assert [turn["content"] for turn in service[1]["messages"]] == ["first", "hi", "second"]
    assert capsys.readouterr().out == "hi\nhi\n"


def test_an_unreachable_service_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr("secateur.client.time.sleep", lambda _: None)
    assert cli.main(["complete", "abc", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err


def test_batch_run_names_the_bad_line(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text("{\n")
    assert cli.main(["batch", "run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 2
    assert "line 1: not JSON" in capsys.readouterr().err


def test_a_batch_may_have_several_services_and_an_order(monkeypatch):
    calls = []
    monkeypatch.setattr("secateur.batch.run_batch", lambda *args, **options: calls.append(options) or BatchSummary())
    urls = ["--base-url", "http://a", "--base-url", "http://b"]
    assert cli.main(["batch", "run", "in.jsonl", "-o", "out.jsonl", *urls, "--ordered"]) == 0
    assert cli.main(["batch", "run", "in.jsonl", "-o", "out.jsonl"]) == 0
    assert [(call["base_url"], call["ordered"]) for call in calls] == [
        (["http://a", "http://b"], True),
        ("http://127.0.0.1:8000", False),
    ]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_batch_prints_its_summary(flags, tmp_path, monkeypatch, capsys):
    summary = BatchSummary(total=3, resumed=1, succeeded=2, completion_tokens=8, seconds=1.5)
    monkeypatch.setattr("secateur.batch.run_batch", lambda *args, **options: summary)
    assert cli.main(["batch", "run", "in.jsonl", "-o", "out.jsonl", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"{summary}\n"
    assert (json.loads(shown.out) if flags else shown.out) == (asdict(summary) if flags else "")


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip()
    for command in (["serve"], ["plan"], ["complete"], ["chat"], ["batch", "run"]):
        assert cli.main([*command, "--help"]) == 0
        assert "Example: secateur " + " ".join(command) in capsys.readouterr().out
