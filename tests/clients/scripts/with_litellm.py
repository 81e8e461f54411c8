# /// script
# dependencies = ["litellm==1.110.2"]
# ///
"""litellm: chats, streams, tools, answers of a type, completions and responses."""

import asyncio
import json
import os
from typing import Literal

from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched from the network
import litellm


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


SERVICE = {"model": "openai/secateur", "api_base": f"{os.environ['SECATEUR_URL']}/v1", "api_key": "none"}
ASKED = {**SERVICE, "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "max_tokens": 200}
PARAMETERS = {"type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS | {"additionalProperties": False}}}


def text_of(chunks: list) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def streamed() -> list:
    return [chunk async for chunk in await litellm.acompletion(**ASKED, stream=True, seed=1)]


whole = litellm.completion(**ASKED, seed=1)
chunks = list(litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True}, seed=1))
assert text_of(chunks) == whole.choices[0].message.content != ""
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
assert text_of(asyncio.run(streamed())) == whole.choices[0].message.content
called = {**ASKED, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
[call] = litellm.completion(**called).choices[0].message.tool_calls
assert json.loads(call.function.arguments)["days"] in (1, 2, 3)
rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**called, stream=True)))
assert rebuilt.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
typed = litellm.completion(**ASKED, response_format=Weather).choices[0].message.content
Weather.model_validate_json(typed)
completed = SERVICE | {"model": "text-completion-openai/secateur"}
assert litellm.text_completion(**completed, prompt="def f(", max_tokens=8).choices[0].text
response = litellm.responses(**SERVICE, input="Hello", max_output_tokens=16)
assert response.output[0].content[0].text
