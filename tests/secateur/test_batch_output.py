"""The output of a batch run: what an earlier answer answers, resumed runs, and the order of lines."""

import asyncio
import json
from pathlib import Path

import httpx2
import pytest

from secateur import batch_output
from secateur.batch_lines import BatchOutputLine
from secateur.batch_output import digests_path, open_output, superseded_path
from secateur.errors import AuthenticationError, BatchError
from tests.support.batch_runs import Service, line, read_output, write

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


@pytest.fixture
def answered(source, output) -> dict[str, BatchOutputLine]:
    """Return the answers of a run."""
    Service().run(source, output)
    return read_output(output)


def lines_with(changed: dict[int, dict]) -> list[dict]:
    return [line(f"q-{n}", **changed.get(n, {})) for n in range(30)]


CHANGES = [
    {"body": {"prompt": "else", "max_tokens": 4}},
    {"body": {"prompt": "q-3", "max_tokens": 5}},
    {"body": {"prompt": "q-3", "max_tokens": 4.0}},
    {"body": {"prompt": "q-3"}},
    {"url": "/v1/chat/completions"},
]


@pytest.mark.parametrize("change", CHANGES)
def test_only_a_changed_line_is_answered_again(source, output, answered, change):
    write(source, *lines_with({3: change}))
    again = Service({"q-3": 200})
    with pytest.warns(UserWarning, match="1 of the lines in .*in.jsonl changed after .* in .*out.jsonl.superseded"):
        summary = again.run(source, output)
    assert len(again.asked) == 1 and (summary.resumed, summary.changed) == (29, 1)
    now = read_output(output)
    assert now.keys() == answered.keys()
    assert {key for key in now if now[key].id != answered[key].id} == {"q-3"}
    assert read_output(superseded_path(output)) == {"q-3": answered["q-3"]}, "an answer may have taken hours"


def test_every_superseded_answer_of_a_line_is_kept(source, output, answered):
    for prompt in ("second", "third", "fourth"):
        if prompt == "fourth":
            with superseded_path(output).open("ab") as file:
                file.write(b'{"id":"torn')  # by a run that was killed here
        write(source, *lines_with({3: {"body": {"prompt": prompt}}}))
        with pytest.warns(UserWarning, match="changed after"):
            Service().run(source, output)
    first, second, torn, third, end = superseded_path(output).read_bytes().split(b"\n")
    assert [json.loads(raw)["custom_id"] for raw in (first, second, third)] == ["q-3"] * 3
    assert json.loads(first)["id"] == answered["q-3"].id
    assert (torn, end) == (b'{"id":"torn', b"") and len(read_output(output)) == 30


def test_a_moved_or_reformatted_line_has_not_changed(source, output, answered):
    lines = [json.dumps(dict(reversed(item.items())), indent=None) for item in lines_with({})]
    lines = [
        text.replace('{"prompt": "q-3", "max_tokens": 4}', '{"max_tokens":4,  "prompt":"\\u0071-3"}') for text in lines
    ]
    write(source, *reversed(lines), "", line("new"))
    again = Service()
    assert again.run(source, output).resumed == 30
    assert again.asked == ["new"]


@pytest.mark.parametrize("number", [0, 29])
def test_an_output_of_another_input_is_an_error_and_unchanged(tmp_path, output, answered, number):
    """An output of another input must not be lost, even if it shares a line."""
    other = write(tmp_path / "other.jsonl", line(f"q-{number}"), line("mine"))
    before, digests, service = output.read_bytes(), digests_path(output).read_bytes(), Service()
    with pytest.raises(BatchError, match=r"out.jsonl holds 29 answers .* not have \(custom_id 'q-\d+' is one\)"):
        service.run(other, output)
    assert service.asked == [] and (output.read_bytes(), digests_path(output).read_bytes()) == (before, digests)
    assert not superseded_path(output).exists()
    assert service.run(other, output, resume=False).succeeded == 2 and read_output(output).keys() == {
        f"q-{number}",
        "mine",
    }


def test_an_output_of_another_input_without_digests_is_an_error_too(tmp_path, output, answered):
    digests_path(output).unlink()
    before = output.read_bytes()
    with pytest.raises(BatchError, match="30 answers to lines that the input does not have"):
        Service().run(write(tmp_path / "other.jsonl", line("mine")), output)
    assert output.read_bytes() == before and not digests_path(output).exists()


def test_failed_answers_to_removed_lines_are_ignored(source, output):
    Service({"q-3": 400}).run(source, output)
    write(source, *[item for item in lines_with({}) if item["custom_id"] != "q-3"])
    idle = Service()
    assert idle.run(source, output).resumed == 29 and idle.asked == []
    assert len(read_output(output)) == 29


@pytest.mark.parametrize("lost", ["all", "some"])
def test_answers_without_digests_are_kept_with_one_warning(source, output, answered, lost):
    """Older versions wrote no digests."""
    kept = digests_path(output).read_bytes().splitlines(keepends=True)[:10] if lost == "some" else []
    digests_path(output).write_bytes(b"".join(kept))
    idle = Service()
    with pytest.warns(UserWarning, match=f"{30 - len(kept)} of the answers in .* are kept although .*--no-resume"):
        assert idle.run(source, output).resumed == 30
    assert idle.asked == [] and read_output(output) == answered
    assert idle.run(source, output).resumed == 30, "without a warning"
    write(source, *lines_with({3: CHANGES[0]}))
    with pytest.warns(UserWarning, match="1 of the lines .* changed"):
        idle.run(source, output)
    assert idle.asked == ["else"]


def test_an_answer_with_a_matching_digest_replaces_one_without(source, output, answered):
    first = answered["q-0"].model_copy(update={"id": "old"}).model_dump_json().encode()
    output.write_bytes(first + b"\n" + output.read_bytes())
    assert Service().run(source, output).resumed == 30
    assert read_output(output) == answered


def test_a_run_killed_at_any_byte_can_be_resumed(tmp_path, output):
    """Return every prefix of the two files as they grow: a digest, then its answer."""
    source = write(tmp_path / "in.jsonl", *[line(f"q-{n}") for n in range(3)])
    Service().run(source, output, concurrency=1)
    answers, digests = output.read_bytes(), digests_path(output).read_bytes()
    writes = [pair for pair in zip(*(data.splitlines(keepends=True) for data in (digests, answers)), strict=True)]
    total = len(answers) + len(digests)
    edges = {sum(len(a) + len(b) for a, b in writes[:n]) + len(writes[n][0]) for n in range(3)}
    for cut in sorted({*range(0, total, 23), *edges, *(edge - 1 for edge in edges), total - 1}):
        files, left = [b"", b""], cut
        for pair in writes:
            for which, data in enumerate(pair):
                files[which] += data[:left]
                left -= min(left, len(data))
        digests_path(output).write_bytes(files[0])
        output.write_bytes(files[1])
        whole = sum(part.endswith(b"}}}") or part.endswith(b"null}") for part in files[1].split(b"\n"))
        service = Service()
        assert service.run(source, output, concurrency=1).resumed == whole
        assert service.asked == [f"q-{n}" for n in range(whole, 3)]
        assert len(read_output(output)) == len(digests_path(output).read_bytes().splitlines()) == 3


def test_a_digest_is_written_before_its_answer(output, answered):
    with open_output(output, {"q-0": "digest"}, resume=False) as opened:
        opened._answers.close()  # as if killed here
        with pytest.raises(ValueError, match="closed"):
            opened.append(answered["q-0"], "digest")
        assert f'"{answered["q-0"].id}"' in digests_path(output).read_text()


def test_a_run_killed_between_the_rewrites_still_detects_changes(source, output, answered, monkeypatch):
    write(source, *lines_with({3: CHANGES[0], 4: {"body": {"prompt": "q-4"}}}))
    replaced, killed = batch_output._replaced, []

    def dying(stack, path, lines):
        if killed:
            raise KeyboardInterrupt
        killed.append(path)
        return replaced(stack, path, lines)

    monkeypatch.setattr(batch_output, "_replaced", dying)
    with pytest.raises(KeyboardInterrupt):
        Service().run(source, output)
    monkeypatch.undo()
    again = Service()
    assert again.run(source, output).succeeded == 2
    assert sorted(again.asked) == ["else", "q-4"] and len(read_output(output)) == 30


def test_a_missing_final_newline_does_not_join_two_answers(source, output, answered):
    """The last of 29 answers lacks its newline, and one answer is missing."""
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:-1])[:-1])
    again = Service()
    assert again.run(source, output).resumed == 29 and len(again.asked) == 1
    assert read_output(output).keys() == answered.keys()


class Shuffled(Service):
    """Answers the first of every two requests after the second."""

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST" and len(self.asked) % 2 == 0:
            self.asked.append("")
            await asyncio.sleep(0.01)
            self.asked.pop()
        return await super().__call__(request)


def order_of(output: Path) -> list[str]:
    return [json.loads(raw)["custom_id"] for raw in output.read_bytes().splitlines()]


def test_answers_are_put_into_the_order_of_the_input_on_request(source, output):
    in_order = [f"q-{n}" for n in range(30)]
    Shuffled().run(source, output, concurrency=4)
    came, answers = order_of(output), read_output(output)
    assert came != in_order
    again = Service()
    summary = again.run(source, output, ordered=True)
    assert summary.resumed == 30 and not again.asked
    assert order_of(output) == in_order and read_output(output) == answers
    assert not list(output.parent.glob("*.tmp"))
    digests = digests_path(output).read_bytes()
    Shuffled().run(source, output, concurrency=4, ordered=True, resume=False)
    assert order_of(output) == in_order and digests_path(output).read_bytes() != digests


def test_a_stopped_run_is_ordered_as_far_as_it_went_and_can_be_resumed(source, output):
    with pytest.raises(AuthenticationError):
        Shuffled(fails={"q-11": 401}).run(source, output, concurrency=4, ordered=True)
    found = order_of(output)
    assert 5 < len(found) < 30 and found == sorted(found, key=lambda name: int(name[2:]))
    service = Service()
    assert service.run(source, output, ordered=True).resumed == len(found)
    assert len(service.asked) == 30 - len(found) and order_of(output) == [f"q-{n}" for n in range(30)]


def test_an_ordered_output_is_locked_until_the_end(source, output, monkeypatch):
    Shuffled().run(source, output, concurrency=4)
    replaced, locked = batch_output._replaced, []

    def replace_and_look(stack, path, lines):
        file = replaced(stack, path, lines)
        if path == output:
            with path.open("ab") as other, pytest.raises(BatchError, match="another run is writing"):
                batch_output._lock(other, path)
            locked.append(path)
        return file

    monkeypatch.setattr(batch_output, "_replaced", replace_and_look)
    Service().run(source, output, ordered=True)
    assert order_of(output) == [f"q-{n}" for n in range(30)] and locked == [output]


def test_an_output_that_cannot_be_rewritten_keeps_its_answers(source, output, monkeypatch):
    Shuffled().run(source, output, concurrency=4)
    came = output.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_output, "_lines_at", full)
    with pytest.raises(BatchError, match="into the order of the input: No space left"):
        Service().run(source, output, ordered=True)
    assert output.read_bytes() == came
