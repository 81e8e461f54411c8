# /// script
# dependencies = ["anthropic==2.14.0"]
# ///
"""anthropic: messages, streams, tools with their results, counted tokens, errors, and a coding agent's conversation.

It asks what vLLM's tests of its endpoint ask, and more.
"""

import asyncio
import json
import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["SECATEUR_URL"], api_key="none", max_retries=0)
SCHEMA = {"type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"]}
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
ASKED = {
    "model": "secateur",
    "max_tokens": 32,
    "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}],
    "extra_body": {"seed": 1},
}

whole = client.messages.create(**ASKED)
assert whole.content[0].text and whole.stop_reason in ("end_turn", "max_tokens") and whole.role == "assistant"
with client.messages.stream(**ASKED) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text == whole.content[0].text
assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason
counted = client.messages.count_tokens(**{name: ASKED[name] for name in ("model", "system", "messages")})
assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
stopped = client.messages.create(**ASKED, stop_sequences=[whole.content[0].text[3:6]])
assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == whole.content[0].text[3:6]

demanded = {**ASKED, "max_tokens": 99, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
called = client.messages.create(**demanded)
[call] = called.content
assert called.stop_reason == "tool_use" and call.name == "weather" and call.input["days"] in (1, 2, 3)
with client.messages.stream(**demanded) as stream:
    kinds = [event.type for event in stream]
    [streamed] = stream.get_final_message().content
assert streamed.input == call.input and kinds.count("content_block_stop") == 1
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain."}]}
turns = [*ASKED["messages"], called.to_param(), {"role": "user", "content": [result]}]
assert client.messages.create(**{**ASKED, "messages": turns, "tools": [TOOL], "tool_choice": {"type": "none"}}).content
prefilled = [*ASKED["messages"], {"role": "assistant", "content": "The weather is"}]
assert client.messages.create(**{**ASKED, "messages": prefilled}).content


def refused(**wrong: object) -> str:
    """Return the type of the error that a wrong request gets."""
    try:
        client.messages.create(**{**ASKED, **wrong})
    except anthropic.APIStatusError as error:
        return error.body["error"]["type"]
    raise SystemExit(f"{wrong} was accepted")


assert refused(max_tokens=0) == "invalid_request_error" and refused(model="another") == "not_found_error"
assert client.models.list().data[0].id == "secateur"


async def concurrently() -> list[anthropic.types.Message]:
    async with anthropic.AsyncAnthropic(base_url=client.base_url, api_key="none", max_retries=0) as other:
        return await asyncio.gather(*(other.messages.create(**ASKED) for _ in range(3)))


assert {each.content[0].text for each in asyncio.run(concurrently())} == {whole.content[0].text}

# ---- sampling


def sampled(**options: object) -> str:
    return client.messages.create(**{**ASKED, "extra_body": options}).content[0].text


assert sampled(temperature=0.0) == sampled(temperature=0.0, seed=2)
assert len({sampled(temperature=2.0, top_k=40, top_p=0.99, seed=seed) for seed in range(8)}) > 1

# ---- events and usage, the second time from the prefix cache

LONG = {**ASKED, "max_tokens": 10, "messages": [{"role": "user", "content": "Explain streaming caches. " * 5}]}
first = client.messages.create(**LONG).usage
total = first.input_tokens + first.cache_read_input_tokens
events = list(client.messages.create(**LONG, stream=True))
kinds = [event.type for event in events]
assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"] and total > 0
assert kinds[1:-2] == ["content_block_start", *["content_block_delta"] * (len(kinds) - 5), "content_block_stop"]
begun, ended = events[0].message, events[-2]
assert (begun.type, begun.role, begun.content, begun.stop_reason) == ("message", "assistant", [], None)
for usage in (begun.usage, ended.usage):
    assert usage.cache_read_input_tokens > 0 and usage.input_tokens + usage.cache_read_input_tokens == total
assert begun.usage.output_tokens == 0 < ended.usage.output_tokens <= 10
assert ended.delta.stop_reason in ("end_turn", "max_tokens") and ended.delta.stop_sequence is None

# ---- a coding agent's turns, as Claude Code writes them

BETA = {"beta": "true"}
EPHEMERAL = {"type": "ephemeral"}
READ = {"type": "object", "properties": {"file_path": {"enum": ["a.py", "b.py"]}}, "required": ["file_path"]}
AGENT = {
    "model": "secateur",
    "max_tokens": 64_000,
    "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.220.85f; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": EPHEMERAL},
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file.", "input_schema": READ, "eager_input_streaming": True},
        {"name": "Bash", "input_schema": {"type": "object"}, "strict": True, "cache_control": EPHEMERAL},
    ],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "session_id": "s"})},
}
turns = [
    {"role": "user", "content": [{"type": "text", "text": "<system-reminder>Today is Friday.</system-reminder>"},
                                 {"type": "text", "text": "What does a.py do?", "cache_control": EPHEMERAL}]},
    {"role": "system", "content": "The user opened a.py."},
]  # fmt: skip
for result in ("def f(): pass", [{"type": "text", "text": "no such file", "cache_control": EPHEMERAL}]):
    choice = {"type": "tool", "name": "Read", "disable_parallel_tool_use": True}
    with client.beta.messages.stream(**AGENT, messages=turns, tool_choice=choice, extra_query=BETA) as stream:
        assert str(stream.response.url).endswith("/v1/messages?beta=true")
        ignored = stream.response.headers["x-secateur-ignored"].split(", ")
        answer = stream.get_final_message()
    assert {"context_management", "output_config.effort", "thinking.display", "tools.strict"} == set(ignored)
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.input["file_path"] in ("a.py", "b.py")
    thought = {"type": "thinking", "thinking": "", "signature": "c2lnbmVk"}
    taken = [block.to_dict() for block in answer.content]
    turns += [
        {"role": "assistant", "content": [thought, *taken]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]},
    ]
last = client.beta.messages.create(**{**AGENT, "max_tokens": 8}, messages=turns)
counted = client.beta.messages.count_tokens(
    **{key: AGENT[key] for key in ("model", "system", "tools", "betas")}, messages=turns
)
assert counted.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens
assert last.usage.cache_read_input_tokens > 0, "the turns before are in the prefix cache"
