r"""JSON Lines: a line ends with \n or \r\n and with no other character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secateur.batch import read_job
from secateur.errors import ConfigError
from secateur.jsonl import lines_of
from secateur.prompts import read_prompts

SEPARATORS = ["\u2028", "\u2029", "\x85", "\x1c", "\x0b", "\x0c"]
"""What `str.splitlines` takes for line ends. JSON strings may hold the first three as they are."""
RAW = "x = 'a\u2028b\u2029c\x85d'"


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def batch_line(custom_id: str) -> str:
    body = {"prompt": RAW}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line, ensure_ascii=False)


@pytest.mark.parametrize("separator", [*SEPARATORS, "\r"])
def test_only_newlines_end_a_line(separator: str) -> None:
    assert list(lines_of(f"a{separator}b\r\n\nc")) == [(1, f"a{separator}b"), (3, "c")]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_prompt_may_contain_unicode_line_separators(tmp_path: Path, end: str) -> None:
    rows = [{"text": RAW}, {"messages": [{"role": "user", "content": RAW}]}]
    file = write(tmp_path / "p.jsonl", *[json.dumps(row, ensure_ascii=False) for row in rows], end=end)
    text, chat = read_prompts(file, 2)
    assert text.text == RAW and chat.messages == rows[1]["messages"]


def test_a_lone_carriage_return_is_whitespace(tmp_path: Path) -> None:
    assert [p.text for p in read_prompts(write(tmp_path / "p.jsonl", '{"text":\r"a"}'), 1)] == ["a"]
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        read_prompts(write(tmp_path / "two.jsonl", '{"text": "a"}\r{"text": "b"}'), 1)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert [p.text for p in read_prompts(write(tmp_path / "p.jsonl", '\ufeff{"text": "a"}'), 1)] == ["a"]
    assert read_job(write(tmp_path / "in.jsonl", "\ufeff" + batch_line("a"))).custom_ids == {"a"}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_line_may_begin_with_a_byte_order_mark_and_be_blank_behind_it(tmp_path: Path, end: str) -> None:
    """Files that were joined have theirs in the middle."""

    def joined(first: str, second: str) -> Path:
        lines = ["", "\ufeff", "\ufeff \t", f"\ufeff{first}", "\ufeff", f"\ufeff{second}", "\ufeff"]
        return write(tmp_path / "joined.jsonl", *lines, end=end)

    assert read_job(joined(batch_line("a"), batch_line("b"))).custom_ids == {"a", "b"}
    assert [p.text for p in read_prompts(joined('{"text": "a"}', '{"text": "b"}'), 2)] == ["a", "b"]


@pytest.mark.parametrize("levels", [203, 900, 990, 5000])
def test_a_value_that_is_nested_too_deeply_is_an_error_of_its_line(tmp_path: Path, levels: int) -> None:
    file = write(tmp_path / "p.jsonl", '{"text": "a"}', "[" * levels + "]" * levels)
    with pytest.raises(ConfigError, match="line 2: not JSON: nested"):
        read_prompts(file, 1)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_batch_line_may_contain_unicode_line_separators(tmp_path: Path, end: str) -> None:
    assert read_job(write(tmp_path / "in.jsonl", batch_line("a"), batch_line("b"), end=end)).custom_ids == {"a", "b"}
