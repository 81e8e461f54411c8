"""The commands that ask a service: complete, chat and batch; what they send, and what they print."""

import io
import json
from dataclasses import asdict

import httpx2
import pytest

from secateur import cli
from secateur.batch_progress import BatchSummary
from secateur.cli.trees import draw_tree
from secateur.client import Client
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
