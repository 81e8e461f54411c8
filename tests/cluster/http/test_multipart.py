"""Forms as they arrive: in pieces of every size, with content that looks like a boundary, and broken ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import BadRequest
from cluster.http.multipart import FormPart, FormReader

CONTENT_TYPE = 'multipart/form-data; charset=utf-8; boundary="-x"'
TRICKY = st.lists(st.sampled_from([b"\r", b"\n", b"-", b"x", b"\r\n--", b"\r\n---", b"a"]), max_size=12).map(b"".join)


def form(*parts: tuple[str, bytes]) -> bytes:
    fields = [
        b"\r\n---x\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + body for head, body in parts
    ]
    return (b"".join(fields) + b"\r\n---x--\r\nepilogue").removeprefix(b"\r\n")


def read(*pieces: bytes, content_type: str = CONTENT_TYPE) -> tuple[list[tuple[FormPart, bytes]], bool]:
    reader, found = FormReader(content_type), list[tuple[FormPart, bytes]]()
    for piece in pieces:
        for item in reader.feed(piece):
            if isinstance(item, FormPart):
                found.append((item, b""))
            else:
                part, content = found.pop()
                found.append((part, content + item))
    return found, reader.is_complete


@given(st.lists(TRICKY.filter(lambda content: b"\r\n---x" not in content), max_size=3), st.data())
def test_parts_come_whole_however_they_are_cut(contents: list[bytes], data: st.DataObject) -> None:
    whole = form(*[(f'name="n{number}"', content) for number, content in enumerate(contents)])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[start:end] for start, end in itertools.pairwise([0, *cuts, len(whole)])]
    expected = [(FormPart(f"n{number}", None), content) for number, content in enumerate(contents)]
    assert read(*pieces) == (expected, True)
    assert read(*(bytes([byte]) for byte in whole)) == (expected, True)


def test_names_files_and_other_headers() -> None:
    parts = [
        ('name="file"; filename="q 1.jsonl"\r\nContent-Type: application/jsonl', b"a\n"),
        ("name=purpose", b"batch"),
        ('name="é"; filename="a;b \\"c\\".jsonl"', b""),
    ]
    found, is_complete = read(form(*parts))
    assert is_complete and [content for _, content in found] == [b"a\n", b"batch", b""]
    assert [part for part, _ in found] == [
        FormPart("file", "q 1.jsonl"),
        FormPart("purpose", None),
        FormPart("é", 'a;b "c".jsonl'),
    ]


def test_large_content_is_not_held() -> None:
    reader = FormReader(CONTENT_TYPE)
    size = 0
    beginning = form(('name="file"', b"")).removesuffix(b"\r\n---x--\r\nepilogue")
    for piece in itertools.chain([beginning], itertools.repeat(b"y" * 65536, 100)):
        found = sum(len(item) for item in reader.feed(piece) if isinstance(item, bytes))
        assert found >= len(piece) - 100 or piece is beginning
        size += found
    assert size > 100 * 65536 - 100


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_what_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(BadRequest, match="multipart/form-data; boundary="):
        FormReader(content_type)


@pytest.mark.parametrize(
    "broken",
    [
        b"---x\r\nContent-Type: text/plain\r\n\r\na\r\n---x--",
        b"---x\r\nContent-Disposition: form-data\r\n\r\na\r\n---x--",
    ],
)
def test_a_part_without_a_name_is_refused(broken: bytes) -> None:
    with pytest.raises(BadRequest, match="part without"):
        read(broken)


@pytest.mark.parametrize("broken", [b"---x\r\nX: " + b"y" * 9000, b"a form", b"---y\r\n", b"---x\r\nno header\r\n"])
def test_what_is_not_the_announced_form_is_refused(broken: bytes) -> None:
    with pytest.raises(BadRequest, match="not the form that its Content-Type announces"):
        read(broken)


def test_a_form_that_breaks_off_is_not_complete() -> None:
    whole = form(('name="a"', b"b"))
    for end in range(len(whole) - len(b"--\r\nepilogue") + 1):
        assert read(whole[:end])[1] is False
