"""OpenAI's protocol: which requests are accepted."""

import pytest
from pydantic import ValidationError

from secateur.bodies import UNSUPPORTED, Structure, listed
from secateur.errors import ConfigError, Problem
from secateur.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    SamplingRequest,
    StreamOptions,
    TokenizeRequest,
)
from secateur.schema import problems_of
from secateur.speculative import Speculative


def completion(**fields) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "a", **fields})


def chat(**fields) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})


def refusal(build, **fields) -> Problem:
    """Return the first problem."""
    with pytest.raises(ValidationError) as caught:
        build(**fields)
    return problems_of(caught.value, SamplingRequest.model_fields)[0]


@pytest.mark.parametrize("request_", [completion(), chat()])
def test_defaults_are_openais(request_):
    assert (request_.temperature, request_.top_p, request_.top_k, request_.min_p) == (1.0, 1.0, 0, 0.0)
    assert request_.unsupported() == [] and request_.ignored() == []


def test_a_completion_stops_after_16_tokens_and_a_chat_at_the_context():
    assert completion().max_output_tokens == 16
    assert chat().max_output_tokens is None
    assert chat(max_tokens=5).max_output_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).max_output_tokens == 7


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_a_prompt_has_four_forms(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [3, [], [[]], [1, "a"], [-1], {"a": 1}, [True]])
def test_a_prompt_of_another_form_is_an_error(prompt):
    assert refusal(completion, prompt=prompt).field == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", 1e39),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("n", 0),
        ("n", True),
        ("seed", "abc"),
        ("stop", [""]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("max_tokens", 10**4299),
        ("min_tokens", 2**31),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("min_tokens", -1),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", [5]),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", [5]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["5"]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", "yes"),
        ("top_logprobs", 21),
        ("top_logprobs", 3),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("speculative", {"num_speculative_tokens": 0}),
        ("speculative", {"acceptance": "gumbel"}),
        ("speculative", {"tree_prune": "off", "tree_prune_min_prob": 0.1}),
        ("speculative", {"prune": 1}),
        ("speculative", 3),
    ],
)
@pytest.mark.parametrize("build", [completion, chat])
def test_a_value_out_of_range_is_refused_and_named(build, field, value):
    assert refusal(build, **{field: value}).field.split(".")[0] == field


@pytest.mark.parametrize(
    ("field", "last", "beyond"),
    [
        ("temperature", 1e6, 1e6 + 1),
        ("top_p", 1.0, 1.001),
        ("min_p", 1.0, 1.001),
        ("n", 128, 129),
        ("seed", 2**63 - 1, 2**63),
        ("seed", -(2**63), -(2**63) - 1),
        ("priority", 2**63 - 1, 2**63),
        ("priority", -(2**63), -(2**63) - 1),
        ("presence_penalty", 2.0, 2.001),
        ("presence_penalty", -2.0, -2.001),
        ("frequency_penalty", 2.0, 2.001),
        ("frequency_penalty", -2.0, -2.001),
        ("repetition_penalty", 0.01, 0.009),
        ("repetition_penalty", 100.0, 100.1),
        ("stop", "a" * 1024, "a" * 1025),
        ("stop", ["a" * 1024] * 64, ["a"] * 65),
        ("stop_token_ids", [1] * 1024, [1] * 1025),
        ("logit_bias", {"5": 100}, {"5": 100.5}),
        ("logit_bias", {"5": -100}, {"5": -100.5}),
        ("logit_bias", {str(id): 1 for id in range(1024)}, {str(id): 1 for id in range(1025)}),
        ("bad_words", ["a" * 128] * 128, ["a"] * 129),
        ("bad_words", ["a" * 128], ["a" * 129]),
        ("allowed_token_ids", [1] * 8192, [1] * 8193),
        ("max_tokens", 2**31 - 1, 2**31),
        ("max_completion_tokens", 1, 0),
        ("truncate_prompt_tokens", 2**31 - 1, 2**31),
        ("prompt_logprobs", 20, 21),
        ("cache_salt", "a" * 512, "a" * 513),
        ("cache_salt", "a", ""),
        ("request_id", "a" * 512, "a" * 513),
        ("request_id", "a", ""),
        ("request_id", "a b", "a\nb"),
        ("first_token_timeout_s", 86_400.0, 86_400.1),
        ("first_token_timeout_s", 1e-3, 0.0),
        ("structured_outputs", {"choice": ["a"] * 1024}, {"choice": ["a"] * 1025}),
        ("structured_outputs", {"choice": ["a"]}, {"choice": []}),
    ],
)
@pytest.mark.parametrize("build", [completion, chat])
def test_a_limit_is_the_last_value_that_is_accepted(build, field, last, beyond):
    assert field in build(**{field: last}).model_fields_set
    assert refusal(build, **{field: beyond}).field.split(".")[0] == field


@pytest.mark.parametrize("top_k", [-1, 0, 1, 2048])
def test_top_k_off_and_on(top_k):
    assert completion(top_k=top_k).top_k == top_k


def test_a_null_means_not_given():
    request = chat(temperature=None, stop=None, n=None, logit_bias=None, tools=None)
    assert request.temperature == 1.0 and request.unsupported() == []


# An example of each JSON type. What is a number may be written without a point; nothing else is taken for another.
JSON = {"string": "1", "integer": 1, "number": 0.5, "boolean": True, "array": ["1"], "object": {"1": 1}}
AS_VLLM_HAS_IT = {("CompletionRequest", "logprobs", "boolean")}  # true is 1


def types_of(schema) -> set[str]:
    """Return the JSON types that a field's schema allows."""
    found = {schema["type"]} if "type" in schema else {"object"} if "$ref" in schema else set()
    return found.union(*(types_of(option) for option in schema.get("anyOf", [])))


def fields_of(model) -> list:
    return [pytest.param(model, name, id=f"{model.__name__}.{name}") for name in model.model_fields]


MODELS = (
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ChatMessage,
    ContentPart,
    StreamOptions,
    Speculative,
)


@pytest.mark.parametrize(("model", "name"), [param for model in MODELS for param in fields_of(model)])
def test_a_value_of_another_json_type_is_refused(model, name):
    allowed = types_of(model.model_json_schema()["properties"][name])
    assert allowed, "a field without a type"
    for kind, value in JSON.items():
        if (
            kind in allowed
            or (kind == "integer" and "number" in allowed)
            or (model.__name__, name, kind) in AS_VLLM_HAS_IT
        ):
            continue
        with pytest.raises((ValidationError, ConfigError)) as caught:
            model.model_validate({name: value})
        wrong = caught.value.problems if isinstance(caught.value, ConfigError) else problems_of(caught.value, ())
        assert name in {problem.field.split(".")[0] for problem in wrong}, (kind, wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": True}),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["5"]),
        ("stop", [5]),
        ("max_tokens", 12.0),
        ("stream_options", {"include_usage": 1}),
        ("speculative", {"tree_prune_min_prob": "0.1"}),
    ],
)
@pytest.mark.parametrize("build", [completion, chat])
def test_strings_are_not_numbers(build, field, value):
    assert refusal(build, **{field: value, "stream": True}).field.split(".")[0] == field


def test_whole_numbers_are_numbers():
    request = completion(temperature=2, top_p=1, logit_bias={"5": 1})
    assert (request.temperature, request.top_p, request.logit_bias) == (2.0, 1.0, {5: 1.0})


@pytest.mark.parametrize(
    ("param", "value"), [("use_beam_search", 0), ("parallel_tool_calls", 1), ("length_penalty", True)]
)
def test_a_neutral_value_of_another_type_is_not_neutral(param, value):
    assert [item.param for item in completion(**{param: value}).unsupported()] == [param]


CALLS = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("model", [ChatCompletionRequest, TokenizeRequest])
def test_a_message_has_content(model, role, content):
    message = {"role": role, **content}
    problem = refusal(lambda **fields: model.model_validate(fields), messages=[message])
    assert problem.field == "messages.0.content" and f"a message of the role {role!r} needs" in problem.message
    assert chat(messages=[{"role": role, "content": ""}]).messages[0].text == ""


@pytest.mark.parametrize(
    "calls", [CALLS, {"function_call": {"name": "f", "arguments": "{}"}}, {"refusal": "I will not."}], ids=list
)
def test_an_assistant_who_calls_or_refuses_needs_no_content(calls):
    [message] = chat(messages=[{"role": "assistant", "content": None, **calls}]).messages
    assert message.text == ""
    for name in calls:  # others have no such thing
        with pytest.raises(ValidationError):
            chat(messages=[{"role": "user", name: calls[name]}])


def test_stop_is_one_text_or_many():
    assert completion(stop="x").stop_strings == ("x",)
    assert completion(stop=["x", "y"]).stop_strings == ("x", "y")


def test_unknown_fields_of_nested_objects_are_named_with_their_place():
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "zeta": 1}, "eta": 1}
    request = chat(response_format=schema, stream=True, stream_options={"theta": 1})
    assert request.ignored() == ["response_format.eta", "response_format.json_schema.zeta", "stream_options.theta"]
    assert chat(response_format={"type": "json_object", "eta": 1}).ignored() == ["response_format.eta"]
    request = completion(structured_outputs={"choice": ["a"], "iota": 1})
    assert request.ignored() == ["structured_outputs.iota"]
    known, unknown = {"type": "function", "function": {"name": "f"}}, {"type": "web_search"}
    tool = {"type": "function", "function": {"name": "f", "kappa": 1}, "lambda": 1}
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [known, unknown]}}
    assert chat(tools=[unknown, tool], tool_choice=chosen).ignored() == [
        "tool_choice.allowed_tools.tools.1 (web_search)",
        "tools.0 (web_search)",
        "tools.1.function.kappa",
        "tools.1.lambda",
    ]


def test_two_structures_are_named():
    problem = refusal(completion, structured_outputs={"choice": ["a"], "regex": "b"})
    assert problem.field == "structured_outputs" and "regex, choice" in problem.message


def test_a_models_defaults_fill_what_a_request_leaves_out():
    request = completion(top_p=0.5).filled({"temperature": 0.0, "top_p": 0.25, "top_k": 7})
    assert (request.temperature, request.top_p, request.top_k, request.min_p) == (0.0, 0.5, 7, completion().min_p)
    with pytest.raises(ConfigError):
        completion(n=2).filled({"temperature": 0.0})


@pytest.mark.parametrize(("number", "ends"), [(19, "18"), (20, "19"), (21, "19, and 1 more")])
def test_a_list_of_more_than_20_says_how_many_more_there_are(number, ends):
    assert listed(map(str, range(number))).endswith(f" {ends}")


def test_unknown_fields_are_kept_and_named():
    request = completion(zebra=1, apple=None, mango="x")
    assert request.ignored() == ["mango", "zebra"] and request.unsupported() == []


@pytest.mark.parametrize("build", [completion, chat])
def test_constraints_of_a_request_are_read(build):
    request = build(
        n=2,
        presence_penalty=-2,
        frequency_penalty=2.0,
        repetition_penalty=1.2,
        logit_bias={"0": -100, "7": 2.5},
        bad_words=["no"],
        allowed_token_ids=[5, 0],
        min_tokens=3,
    )
    assert (request.n, request.presence_penalty, request.frequency_penalty) == (2, -2.0, 2.0)
    assert request.logit_bias == {0: -100.0, 7: 2.5}
    assert (request.bad_words, request.allowed_token_ids, request.min_tokens) == (["no"], [5, 0], 3)
    assert request.unsupported() == [] and request.ignored() == []


@pytest.mark.parametrize("temperature", [0, 1e-6])
@pytest.mark.parametrize("build", [completion, chat])
def test_greedy_sampling_has_one_answer(build, temperature):
    assert build(temperature=temperature).is_greedy
    problem = refusal(build, n=2, temperature=temperature)
    assert problem.field == "n" and "must be 1 when using greedy sampling" in problem.message
    assert build(n=2, temperature=1e-4).n == 2


def test_min_tokens_is_at_most_max_tokens():
    assert completion(min_tokens=16).min_tokens == 16
    assert chat(min_tokens=5000).min_tokens == 5000
    assert "17 is more than max_tokens=16" in refusal(completion, min_tokens=17).message
    assert "6 is more than max_tokens=5" in refusal(chat, min_tokens=6, max_tokens=99, max_completion_tokens=5).message


@pytest.mark.parametrize(
    ("request_", "num"),
    [
        (completion(), None),
        (completion(logprobs=None), None),
        (completion(logprobs=0), 0),
        (completion(logprobs=20), 20),
        (completion(logprobs=True), 1),
        (completion(logprobs=False), None),
        (chat(), None),
        (chat(logprobs=False, top_logprobs=0), None),
        (chat(logprobs=True), 0),
        (chat(logprobs=True, top_logprobs=20), 20),
    ],
)
def test_completions_and_chats_request_log_probabilities_differently(request_, num):
    assert request_.num_logprobs == num


def test_prompts_are_scored_on_request_and_for_an_echo_with_log_probabilities():
    asked = [{}, {"echo": True}, {"logprobs": 3}, {"echo": True, "logprobs": 3}, {"prompt_logprobs": 0}]
    assert [completion(**fields).num_prompt_logprobs for fields in asked] == [None, None, None, 3, 0]
    assert completion(echo=True, logprobs=3, prompt_logprobs=5).num_prompt_logprobs == 5
    assert chat(prompt_logprobs=2).num_prompt_logprobs == 2 and chat(logprobs=True).num_prompt_logprobs is None
    for build in (completion, chat):
        assert refusal(build, prompt_logprobs=1, stream=True).field == "prompt_logprobs"
        for wrong in (-1, 21, True):
            assert refusal(build, prompt_logprobs=wrong).field == "prompt_logprobs"
    assert completion(echo=True, logprobs=1, stream=True).num_prompt_logprobs == 1
    assert chat(echo=True).echoed_text == "", "only the assistant's words are repeated"


def test_an_answer_may_be_empty_where_the_prompt_is_returned():
    for more in ({"echo": True}, {"prompt_logprobs": 0}):
        assert completion(max_tokens=0, **more).max_output_tokens == 0
    assert completion(max_tokens=0, max_completion_tokens=3).max_output_tokens == 3
    assert "only allowed with echo" in refusal(completion, max_tokens=0).message
    assert refusal(completion, max_tokens=0, echo=True, min_tokens=1).field == "min_tokens"
    assert refusal(completion, max_completion_tokens=0, echo=True).field == "max_completion_tokens"
    assert refusal(chat, max_tokens=0).field == "max_tokens"


def test_the_other_routes_logprobs_fields_are_an_error():
    assert "write logprobs=true and top_logprobs=5" in refusal(chat, logprobs=5).message
    assert "write logprobs=5" in refusal(completion, top_logprobs=5).message
    assert "only allowed with logprobs=true" in refusal(chat, top_logprobs=5).message


@pytest.mark.parametrize("build", [completion, chat, lambda **more: TokenizeRequest(prompt="a", **more)])
def test_a_prompt_is_cut_to_some_tokens_or_to_what_fits(build):
    assert [build(truncate_prompt_tokens=value).truncate_prompt_tokens for value in (-1, 1, 99)] == [-1, 1, 99]
    for wrong in (0, -2, True, 1.5, "1"):
        assert refusal(build, truncate_prompt_tokens=wrong).field == "truncate_prompt_tokens"


@pytest.mark.parametrize("build", [completion, chat])
def test_a_prompt_is_cut_on_the_side_that_is_named(build):
    assert build().truncation_side == "left"
    assert build(truncation_side="right").ignored() == ["truncation_side"], "nothing is cut"
    assert build(truncation_side="right", truncate_prompt_tokens=3).ignored() == []
    assert refusal(build, truncation_side="middle").field == "truncation_side"


def test_token_names_without_log_probabilities_have_no_effect():
    assert completion(return_tokens_as_token_ids=True).ignored() == ["return_tokens_as_token_ids"]
    assert completion(return_tokens_as_token_ids=True, logprobs=0).ignored() == []
    assert chat(return_tokens_as_token_ids=True, logprobs=True).ignored() == []


@pytest.mark.parametrize("build", [completion, chat])
def test_best_of_is_fine_where_all_answers_are_returned(build):
    assert build(n=3, best_of=3).unsupported() == [] and build(best_of=1).unsupported() == []
    assert [item.param for item in build(n=2, best_of=3).unsupported()] == ["best_of"]


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("use_beam_search", {"use_beam_search": True, "n": 2, "temperature": 0}),
        ("best_of", {"best_of": 3, "n": 2, "temperature": 0}),
    ],
)
@pytest.mark.parametrize("build", [completion, chat])
def test_an_unimplemented_parameter_is_reported_first(build, param, asked):
    assert [item.param for item in build(**asked).unsupported()] == [param]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "needs logprobs: true in a chat, 0 or more in a completion"),
        ({"logprobs": 1, "logprob_token_ids": []}, "must have at least 1 item"),
        ({"logprobs": 1, "logprob_token_ids": list(range(129))}, "must have at most 128 items"),
        ({"logprobs": 1, "max_tokens": 0, "echo": True}, "max_tokens=0 has no answer to report them for"),
    ],
)
def test_chosen_log_probabilities_need_log_probabilities_and_an_answer(fields, says):
    assert says in refusal(completion, **{"logprob_token_ids": [5], **fields}).message
    if not fields:
        assert says in refusal(chat, logprob_token_ids=[5]).message
    assert completion(logprob_token_ids=[5], logprobs=0).num_logprobs == 0
    assert chat(logprob_token_ids=[5], logprobs=True).num_logprobs == 0


def test_all_invalid_keys_of_a_logit_bias_are_named():
    problem = refusal(completion, logit_bias={"five": 1, "7": 1, "-5": 1, "05": 1})
    assert problem.field == "logit_bias" and "'five', '-5', '05'" in problem.message and "'7'" not in problem.message
    many = refusal(completion, logit_bias={f"x{n}": 1 for n in range(900)}).message
    assert "'x0'" in many and "880 more" in many and len(many) < 500


NOT_NEUTRAL = {
    "best_of": 2,
    "length_penalty": 1.5,
    "suffix": "x",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "guided_json": {},
    "guided_regex": "a",
    "regex": "a",
    "ebnf": "a",
    "use_beam_search": True,
    "spaces_between_special_tokens": False,
}


@pytest.mark.parametrize("param", NOT_NEUTRAL)
def test_a_known_parameter_we_do_not_implement_is_named(param):
    [found] = completion(**{param: NOT_NEUTRAL[param]}).unsupported()
    assert found.param == param and found.why


@pytest.mark.parametrize("param", [param for param in UNSUPPORTED if UNSUPPORTED[param][0]])
def test_a_neutral_value_of_an_unimplemented_parameter_is_accepted(param):
    value = UNSUPPORTED[param][0][0]
    assert completion(**{param: value}).unsupported() == []


def test_message_content_is_a_text_or_text_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "content": parts}])
    assert request.messages[0].text == "ab"


def test_a_chat_needs_a_message():
    assert refusal(chat, messages=[]).field == "messages"


def test_continuing_a_message_turns_the_generation_prompt_off():
    assert chat(continue_final_message=True).add_generation_prompt is False
    assert "contradicts" in refusal(chat, continue_final_message=True, add_generation_prompt=True).message


def test_what_a_benchmark_client_sends_is_accepted():
    request = chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_completion_tokens=16,
        ignore_eos=True,
    )
    assert request.unsupported() == [] and request.ignored() == []


@pytest.mark.parametrize(
    ("options", "at_end", "in_chunks", "ignored"),
    [
        ({}, False, False, []),
        ({"include_usage": True}, True, False, []),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True, []),
        ({"continuous_usage_stats": True}, True, True, []),
        ({"include_usage": None, "continuous_usage_stats": True}, True, True, []),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False, ["continuous_usage_stats"]),
        ({"include_usage": False, "continuous_usage_stats": False}, False, False, []),
        ({"include_obfuscation": False}, False, False, ["include_obfuscation"]),
    ],
)
def test_a_stream_reports_usage_as_vllm_does(options, at_end, in_chunks, ignored):
    request = chat(stream=True, stream_options=options)
    assert (request.stream_options.usage_at_end, request.stream_options.usage_in_chunks) == (at_end, in_chunks)
    assert request.ignored() == [f"stream_options.{name}" for name in ignored]


def test_tokenize_reads_messages_as_a_chat_does():
    messages = [{"role": "assistant", "content": "a"}]
    asked = {"messages": messages, "continue_final_message": True, "chat_template_kwargs": {"x": 1}, "tools": [{}]}
    request = TokenizeRequest.model_validate(asked)
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)
    assert (request.chat_template_kwargs, request.tools) == ({"x": 1}, [{}])
    assert request.unsupported() == request.ignored() == []
    wrong = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert "contradicts" in refusal(lambda **fields: TokenizeRequest.model_validate(fields), **wrong).message


def test_special_tokens_are_added_to_texts_and_not_to_chats():
    messages = [{"role": "user", "content": "a"}]
    asked = [{"prompt": "a"}, {"messages": messages}]
    for value, expected in ((None, [True, False]), (True, [True, True]), (False, [False, False])):
        found = [TokenizeRequest.model_validate({**body, "add_special_tokens": value}) for body in asked]
        assert [request.with_special_tokens for request in found] == expected


def test_fields_unsupported_by_tokenize_are_named():
    request = TokenizeRequest.model_validate({"prompt": "a", "continue_final_message": True, "temperature": 1})
    assert request.ignored() == ["continue_final_message", "temperature"]
    request = TokenizeRequest.model_validate({"prompt": "a", "chat_template": "x"})
    assert [item.param for item in request.unsupported()] == ["chat_template"]
    assert DetokenizeRequest.model_validate({"tokens": [1], "skip": True}).ignored() == ["skip"]


def test_tokenize_takes_a_prompt_or_messages():
    assert TokenizeRequest(prompt="a").prompt == "a"
    for wrong in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(ValidationError, match="either prompt or messages"):
            TokenizeRequest.model_validate(wrong)
    with pytest.raises(ValidationError):
        DetokenizeRequest.model_validate({"tokens": [-1]})


@pytest.mark.parametrize(
    ("asked", "kind", "source", "whitespace"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}, "free"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [None]}}}},
            "json",
            {"enum": [None]},
            "free",
        ),
        ({"structured_outputs": {"json": {"a": None}, "disable_any_whitespace": True}}, "json", {"a": None}, "none"),
        ({"structured_outputs": {"json": "{}", "regex": None}}, "json", "{}", "free"),
        ({"structured_outputs": {"regex": ""}}, "regex", "", "free"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "free"),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A", "free"),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}, "free"),
    ],
)
def test_a_structure_is_read_from_either_field(asked, kind, source, whitespace):
    for body in (completion(**asked), chat(**asked)):
        assert body.unsupported() == body.ignored() == []
        assert body.structure == Structure(kind, source, next(iter(asked)), whitespace, True)
    assert completion(response_format={"type": "text"}).structure is None


def test_two_structures_contradict_each_other():
    problem = refusal(completion, structured_outputs={"regex": "a"}, response_format={"type": "json_object"})
    assert problem.field == "structured_outputs" and "contradicts response_format" in problem.message
    for name, value in {"json": {}, "regex": "a", "choice": ["a"], "grammar": "start: A"}.items():
        problem = refusal(completion, structured_outputs={name: value, "json_object": True})
        assert problem.field == "structured_outputs" and f"got {name} and json_object" in problem.message


def test_obsolete_names_of_vllm_say_what_to_write():
    for kind in ("json", "regex", "choice", "grammar"):
        [found] = completion(**{f"guided_{kind}": "a"}).unsupported()
        assert found.param == f"guided_{kind}" and f'structured_outputs={{"{kind}": ...}}' in found.why
