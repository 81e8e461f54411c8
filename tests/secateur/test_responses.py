"""OpenAI's protocol: its own types parse our responses."""

import json

import openai.types
import openai.types.chat
import pytest
from pydantic import BaseModel

from secateur.batch_lines import BatchOutputLine
from secateur.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    SpeculativeStats,
    TokenizeResponse,
    TokenLogprob,
    TopLogprob,
    Usage,
)


def read_as(model: type[BaseModel], answer: BaseModel) -> BaseModel:
    """Parse `answer` as OpenAI's type, which is strict about literals and required fields."""
    return model.model_validate_json(answer.model_dump_json())


STATS = SpeculativeStats(
    num_drafts=5,
    num_draft_tokens=15,
    num_verified=15,
    num_accepted_tokens=9,
    drafted_per_depth=[5, 5, 5],
    verified_per_depth=[5, 5, 5],
    accepted_per_depth=[4, 3, 2],
)


def test_openai_reads_a_completion():
    answer = CompletionResponse(
        model="m",
        choices=[CompletionChoice(text="x", finish_reason="stop", token_ids=[1])],
        usage=Usage.of(3, 10, accepted=9, rejected=6, reasoning=4),
        speculative=STATS,
    )
    read = read_as(openai.types.Completion, answer)
    assert isinstance(read, openai.types.Completion)
    assert read.usage and read.usage.total_tokens == 13
    assert read.usage.completion_tokens_details
    assert read.usage.completion_tokens_details.accepted_prediction_tokens == 9
    assert read.usage.completion_tokens_details.reasoning_tokens == 4
    assert read.model_extra and read.model_extra["speculative"]["acceptance_length"] == 2.8


def test_openai_reads_a_chat_completion():
    choice = ChatChoice(message=AssistantMessage(content="x"), finish_reason="length")
    read = read_as(openai.types.chat.ChatCompletion, ChatCompletionResponse(model="m", choices=[choice]))
    assert isinstance(read, openai.types.chat.ChatCompletion)
    assert read.choices[0].message.content == "x" and read.id.startswith("chatcmpl-")


SCORED = TokenLogprob(
    token="x", logprob=-1.0, bytes=[120], top_logprobs=[TopLogprob(token="y", logprob=-0.5, bytes=[121])]
)


def test_openai_reads_log_probabilities():
    choice = ChatChoice(
        message=AssistantMessage(content="x"), finish_reason="stop", logprobs=ChatLogprobs(content=[SCORED])
    )
    chat_read = read_as(openai.types.chat.ChatCompletion, ChatCompletionResponse(model="m", choices=[choice]))
    assert isinstance(chat_read, openai.types.chat.ChatCompletion)
    assert chat_read.choices[0].logprobs and chat_read.choices[0].logprobs.content
    assert chat_read.choices[0].logprobs.content[0].model_dump() == SCORED.model_dump()
    four = CompletionLogprobs(
        tokens=["x"], token_logprobs=[-1.0], top_logprobs=[{"y": -0.5, "x": -1.0}], text_offset=[0]
    )
    answer = CompletionResponse(model="m", choices=[CompletionChoice(text="x", finish_reason="stop", logprobs=four)])
    read = read_as(openai.types.Completion, answer)
    assert isinstance(read, openai.types.Completion) and read.choices[0].logprobs
    assert read.choices[0].logprobs.model_dump() == four.model_dump()
    assert CompletionResponse.model_validate_json(answer.model_dump_json()).choices[0].logprobs == four


@pytest.mark.parametrize("finish_reason", [None, "stop", "length"])
def test_openai_reads_chat_chunks(finish_reason):
    choice = ChatChunkChoice(delta=ChatDelta(role="assistant", content="x"), finish_reason=finish_reason)
    read = read_as(openai.types.chat.ChatCompletionChunk, ChatCompletionChunk(model="m", choices=[choice]))
    assert isinstance(read, openai.types.chat.ChatCompletionChunk) and read.choices[0].delta.content == "x"


def test_openai_reads_the_usage_chunk_and_the_model_list():
    usage = read_as(
        openai.types.chat.ChatCompletionChunk, ChatCompletionChunk(model="m", choices=[], usage=Usage.of(1, 2))
    )
    assert isinstance(usage, openai.types.chat.ChatCompletionChunk) and usage.usage and usage.choices == []
    for card in ModelList(data=[ModelCard(id="m", max_model_len=5)]).data:
        assert isinstance(read_as(openai.types.Model, card), openai.types.Model)


def test_a_streamed_completions_object_is_text_completion():
    chunk = json.loads(CompletionChunk(model="m", choices=[CompletionChoice(text="x")]).model_dump_json())
    assert chunk["object"] == "text_completion"
    nulls = dict.fromkeys(
        ["finish_reason", "logprobs", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"]
    )
    assert chunk["choices"] == [{"index": 0, "text": "x", **nulls}]
    assert "usage" not in chunk and "speculative" not in chunk


def test_fields_that_vllms_clients_read_are_null_by_default():
    def written(answer) -> dict:
        return json.loads(answer.model_dump_json())

    for_tokens = written(TokenizeResponse(tokens=[1], count=1))
    assert for_tokens["token_strs"] is None
    [choice] = written(CompletionResponse(model="m", choices=[CompletionChoice()]))["choices"]
    chat_answer = written(ChatCompletionResponse(model="m", choices=[ChatChoice(message=AssistantMessage())]))
    for place, names in (
        (choice, ("prompt_logprobs", "prompt_token_ids", "token_ids", "stop_reason")),
        (chat_answer, ("prompt_logprobs", "prompt_token_ids")),
        (chat_answer["choices"][0], ("token_ids", "stop_reason")),
    ):
        assert all(name in place and place[name] is None for name in names)
    assert "prompt_token_ids" not in chat_answer["choices"][0]


def test_a_chunk_is_one_server_sent_event():
    event = CompletionChunk(model="m", choices=[CompletionChoice(text="a\n\nb")]).sse()
    assert event.startswith("data: {") and event.endswith("}\n\n") and event.count("\n") == 2


def test_an_error_has_openais_shape():
    body = json.loads(ErrorResponse.of("no", param="n").model_dump_json())
    assert body == {"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}}


def test_the_schema_of_a_response_names_its_fields():
    schema = ChatCompletionResponse.model_json_schema(mode="serialization")
    assert {"id", "choices", "usage", "speculative"} <= schema["properties"].keys()


def test_acceptance_length_is_one_plus_accepted_per_draft():
    assert STATS.acceptance_length == 2.8 and STATS.acceptance_rate == 0.6
    assert SpeculativeStats().acceptance_length == 1.0 and SpeculativeStats().acceptance_rate == 0.0


def test_statistics_survive_the_wire():
    assert SpeculativeStats.model_validate_json(STATS.model_dump_json()) == STATS


def test_a_batch_line_succeeded_only_without_error():
    good = {"id": "a", "custom_id": "b", "response": {"status_code": 200, "request_id": "c", "body": {}}, "error": None}
    assert BatchOutputLine.model_validate(good).succeeded
    assert not BatchOutputLine.model_validate({**good, "error": {"code": "x", "message": "y"}}).succeeded
    assert not BatchOutputLine.model_validate({**good, "response": None}).succeeded
