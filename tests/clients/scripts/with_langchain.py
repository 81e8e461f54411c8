# /// script
# dependencies = ["langchain-openai"]
# ///
"""langchain: streams, bound tools and structured output."""

import os
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


chat = ChatOpenAI(base_url=f"{os.environ['SECATEUR_URL']}/v1", api_key="none", model="secateur", max_tokens=200)
assert "".join(chunk.text for chunk in chat.stream("Hello"))
called = chat.bind_tools([Weather], tool_choice="any").invoke("What is the weather in Paris?")
assert called.tool_calls and all(Weather.model_validate(call["args"]) for call in called.tool_calls)
for method in ("json_schema", "function_calling"):
    answer = chat.with_structured_output(Weather, method=method).invoke("What is the weather in Paris?")
    assert isinstance(answer, Weather), method
