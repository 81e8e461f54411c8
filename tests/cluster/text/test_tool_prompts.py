"""Chat templates get tools and calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls import ToolCallReader
from cluster.text.tool_prompts import TAUGHT_FORMAT, taught
from tests.support.fake_service import error_of, fake_service
from tests.support.tools import CHAT, HI, TOOLS, copied_tokenizer


def test_a_template_without_tools_gets_them_and_all_calls_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "order", "arguments": {"what": "tea"}}}
    messages = [
        {"role": "system", "content": "Be short."},
        HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    system, user, assistant, result = taught(messages, TOOLS)
    assert system["content"].startswith("Be short.\n\n") and '"name": "order"' in system["content"]
    assert user == HI
    assert assistant["content"] == '<tool_call>\n{"name": "order", "arguments": {"what": "tea"}}\n</tool_call>'
    assert (result["role"], result["content"]) == ("user", "<tool_response>\ndone\n</tool_response>")
    told = ToolCallReader(TAUGHT_FORMAT).feed(assistant["content"]).calls
    assert (told[0].name, "".join(part.arguments for part in told)) == ("order", '{"what": "tea"}')
    assert "tool_calls" not in assistant
    said = taught([{"role": "assistant", "content": "So:", "tool_calls": [call]}], None)[0]["content"]
    assert said == 'So:\n<tool_call>\n{"name": "order", "arguments": {"what": "tea"}}\n</tool_call>'
    assert (
        "Café" in taught([HI], [{"type": "function", "function": {"name": "f", "description": "Café"}}])[0]["content"]
    )
    [only, *rest] = taught([HI], TOOLS)
    assert only["role"] == "system" and rest == [HI] and taught([HI], None) == [HI]


def test_a_template_with_tools_gets_the_arguments_of_earlier_calls_as_objects(script: Any, tmp_path: Path) -> None:
    folder = copied_tokenizer(
        tmp_path,
        "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['arguments']['what'] }}{% endfor %}{% endfor %}"
        "{% for tool in tools or [] %}|{{ tool['function']['name'] }}{% endfor %}<tool_call>",
    )
    arguments = json.dumps({"what": "tea"})
    call = {"id": "1", "type": "function", "function": {"name": "order", "arguments": arguments}}
    messages = [HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    with fake_service(Tokenizer(str(folder)), tmp_path, script) as own, own.http() as http:
        body = {"messages": messages, "tools": TOOLS, "max_tokens": 1}
        assert http.post(CHAT, json=body).status_code == 200
        told = own.engine.submitted[-1].prompt
        assert own.service.tokenizer.decode(told) == "ateaok|order|stop<tool_call>"
        call["function"]["arguments"] = "{'what'"
        error = error_of(http.post(CHAT, json=body))
        assert error["message"].startswith("messages.1.tool_calls.0.function.arguments: is not JSON")
        assert error["param"] == "messages"
