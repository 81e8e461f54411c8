# /// script
# dependencies = ["litellm"]
# ///
"""litellm: chats, streams and tools."""

import json
import os

import litellm

ASKED = {
    "model": "openai/secateur",
    "api_base": f"{os.environ['SECATEUR_URL']}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "max_tokens": 200,
}
PARAMETERS = {"type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS | {"additionalProperties": False}}}
assert litellm.completion(**ASKED).choices[0].message.content
assert [chunk for chunk in litellm.completion(**ASKED, stream=True)]
message = litellm.completion(**ASKED, tools=[TOOL], tool_choice="required").choices[0].message
assert all(json.loads(call.function.arguments)["days"] in (1, 2, 3) for call in message.tool_calls)
