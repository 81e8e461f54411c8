# /// script
# dependencies = ["langchain-openai==1.7.4"]
# ///
"""langchain: answers, streams, bound tools with their results, and structured output, over chats and responses."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


ASKED = HumanMessage("What is the weather in Paris?")
for use_responses_api in (False, True):
    chat = ChatOpenAI(
        base_url=f"{os.environ['SECATEUR_URL']}/v1",
        api_key="none",
        model="secateur",
        max_tokens=200,
        use_responses_api=use_responses_api,
    )
    answer = chat.invoke([ASKED])
    assert answer.text and answer.usage_metadata["output_tokens"] <= 200
    assert "".join(chunk.text for chunk in chat.stream([ASKED]))
    bound = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    called = bound.invoke([ASKED])
    [call] = called.tool_calls
    Weather.model_validate(call["args"])
    streamed = None
    for chunk in bound.stream([ASKED]):
        streamed = chunk if streamed is None else streamed + chunk
    Weather.model_validate(streamed.tool_calls[0]["args"])
    told = chat.invoke([ASKED, called, ToolMessage("sunny", tool_call_id=call["id"])])
    assert isinstance(told.text, str)
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Weather, method=method).invoke([ASKED])
        assert isinstance(found, Weather), method
