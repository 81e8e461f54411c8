# /// script
# dependencies = ["anthropic==2.14.0"]
# ///
"""anthropic: messages, streams, tools with their results, counted tokens and errors."""

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
