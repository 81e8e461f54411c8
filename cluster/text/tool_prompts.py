"""Gives chat templates tools and calls; those that know no tools get both as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import PromptError
from secateur.requests import ChatCompletionRequest, TokenizeRequest

TAUGHT_FORMAT = "hermes"
"""The format that `taught` teaches models whose chat templates know no tools."""
_TEACHING = """\
You may call functions. These are their signatures, as JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>"""


def tools_of(body: ChatCompletionRequest | TokenizeRequest) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template gets; as in vLLM, it gets them whatever the tool choice is."""
    if isinstance(body, TokenizeRequest):
        return body.tools
    return [
        tool.model_dump(exclude_unset=True)
        if tool.type == "function"
        else {"type": "function", "function": tool.called.model_dump(exclude_none=True)}
        for tool in body.offered.values()
        if tool.called is not None
    ] or None


def decoded_calls(calls: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the calls of message `number` with their arguments as objects, which chat templates expect.

    Raises PromptError for arguments that are not JSON.
    """
    decoded = []
    for place, call in enumerate(calls):
        if isinstance(custom := call.get("custom"), Mapping):
            told = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
            decoded.append({"id": call.get("id"), "type": "function", "function": told})
            continue
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
            decoded.append(dict(call))
            continue
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            where = f"messages.{number}.tool_calls.{place}.function.arguments"
            raise PromptError(f"{where}: is not JSON; write an object, as text", param="messages") from None
        decoded.append({**call, "function": {**function, "arguments": arguments}})
    return decoded


def taught(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return a conversation for a chat template that knows neither tools nor calls: both become text."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    text = _TEACHING.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls, or whose role `tool`, are text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls", ()) if isinstance(call.get("function"), Mapping)]
    written = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join([text for text in (message["content"],) if text] + written)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
