"""A line of an output file is one line to every program, and holds the response unchanged."""

from __future__ import annotations

import json

from cluster.batches.answer_lines import answered, unanswered


def test_a_line_is_one_line_and_keeps_the_text() -> None:
    text = 'é 🌳 \x85 \u2028 \u2029 \\u2028 "\n'
    body = json.dumps({"text": text}, ensure_ascii=False)
    line = answered("id \u2028", status=200, request_id='a"b', body=body)
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert found["custom_id"] == "id \u2028" and found["error"] is None
    assert found["response"] == {"status_code": 200, "request_id": 'a"b', "body": {"text": text}}


def test_ignored_fields_are_added_to_the_response() -> None:
    found = json.loads(answered("a", status=400, request_id="r", body="{}", ignored='x, "y"'))
    assert found["response"]["headers"] == {"x-secateur-ignored": 'x, "y"'}


def test_a_request_without_an_answer_has_an_error_instead() -> None:
    first, second = (json.loads(unanswered("é", "batch_expired", "Too late.")) for _ in range(2))
    assert first["response"] is None and first["error"] == {"code": "batch_expired", "message": "Too late."}
    assert first["id"] != second["id"] and first["custom_id"] == "é"
