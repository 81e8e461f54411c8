# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""openai: chats, responses, streams, parsed answers, tools, completions with log probabilities, models, batches."""

import json
import os
import time
from typing import Literal

from openai import BadRequestError, ConflictError, NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=f"{os.environ['SECATEUR_URL']}/v1", api_key="none")
MODEL = client.models.list().data[0].id
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


TOOL = pydantic_function_tool(Weather)

answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, seed=1)
assert answer.usage.completion_tokens <= 16 and answer.choices[0].message.role == "assistant"
chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, seed=1, stream=True))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content

parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather)
assert isinstance(parsed.choices[0].message.parsed, Weather)

called = client.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", seed=3)
calls = called.choices[0].message.tool_calls
assert called.choices[0].finish_reason == "tool_calls" and calls
assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
with client.chat.completions.stream(
    model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", seed=3
) as stream:
    streamed = stream.get_final_completion().choices[0]
assert [call.function.arguments for call in streamed.message.tool_calls] == [call.function.arguments for call in calls]

named = client.chat.completions.create(
    model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "Weather"}}
)
[call] = named.choices[0].message.tool_calls
Weather.model_validate(json.loads(call.function.arguments))
history = [
    *MESSAGES,
    named.choices[0].message,
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
free = client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL], max_tokens=16)
assert free.choices[0].finish_reason in ("length", "stop", "tool_calls")

text = client.completions.create(model=MODEL, prompt="def f(", max_tokens=4, logprobs=2, echo=True)
assert text.choices[0].text.startswith("def f(") and text.choices[0].logprobs.token_logprobs[0] is None
status = None
try:
    client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
except BadRequestError as error:
    status = error.status_code, error.param
assert status == (400, "temperature")

first = client.responses.create(model=MODEL, input="Hello", instructions="Be short.", max_output_tokens=16)
assert first.output_text and first.usage.output_tokens <= 16
second = client.responses.create(
    model=MODEL, input="Go on.", previous_response_id=first.id, max_output_tokens=16, store=False
)
assert second.previous_response_id == first.id and client.responses.retrieve(first.id).output == first.output
assert [item.content for item in client.responses.input_items.list(first.id).data]
bound = client.responses.parse(model=MODEL, input="What is the weather?", text_format=Weather)
assert isinstance(bound.output_parsed, Weather)
FLAT = {"type": "function", "name": "Weather", "parameters": Weather.model_json_schema(), "strict": True}
demanded = client.responses.create(model=MODEL, input="Weather?", tools=[FLAT], tool_choice="required")
assert all(Weather.model_validate_json(item.arguments) for item in demanded.output if item.type == "function_call")
results = [
    {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    for item in demanded.output
    if item.type == "function_call"
]
assert results and client.responses.create(
    model=MODEL, input=[{"role": "user", "content": "Weather?"}, *demanded.output, *results], max_output_tokens=16
)
with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=16) as told:
    events = list(told)
text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
assert text and text == events[-1].response.output_text
client.responses.delete(first.id)

CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "seed": 1}
lines = [
    {"custom_id": f"line {n}", "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "seed": n}}
    for n in range(20)
]
lines[7]["body"]["temperature"] = -1
sent = client.files.create(file=("in.jsonl", "".join(json.dumps(line) + "\n" for line in lines)), purpose="batch")
assert sent.id in [file.id for file in client.files.list(purpose="batch", limit=5)]
assert len(client.files.content(sent.id).text.splitlines()) == len(lines)
batch = client.batches.create(
    input_file_id=sent.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"made by": "a client"}
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
assert batch.status == "completed" and batch.metadata == {"made by": "a client"}, batch
assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 19, 1)
answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
assert [answer["custom_id"] for answer in answers] == [f"line {n}" for n in range(20) if n != 7]
assert answers[1]["response"]["body"]["choices"][0]["message"]["content"] == (
    client.chat.completions.create(**CHAT).choices[0].message.content
)
[wrong] = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
assert wrong["custom_id"] == "line 7" and wrong["response"]["body"]["error"]["param"] == "temperature"
pages = list(client.batches.list(limit=1))
assert [each.id for each in pages] == [batch.id]
status = None
try:
    client.batches.cancel(batch.id)
except ConflictError as error:
    status = error.status_code
assert status == 409
assert client.files.delete(sent.id).deleted
try:
    client.files.retrieve(sent.id)
except NotFoundError as error:
    status = error.status_code
assert status == 404
