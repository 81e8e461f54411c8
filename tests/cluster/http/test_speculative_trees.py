"""`return_speculative_trees`: each step's tree with its texts, and where each token came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from cluster.openai.openai_format import speculative_tree
from cluster.openai.output_processor import Generation, StepTree
from cluster.text.tokenizer import Tokenizer
from secateur.responses import ChatCompletionChunk, CompletionChunk, CompletionResponse, SpeculativeTree
from tests.support.fake_engine import tree_of
from tests.support.fake_service import ANSWER, FakeService, error_of, stream
from workers.comm.ipc import Submit, TokenChunk

ASKED = {"return_speculative_trees": True, "max_tokens": 64}


def texts(trees: list[SpeculativeTree]) -> str:
    return "".join(token.text for tree in trees for token in tree.tokens)


def test_a_tree_names_what_became_of_each_node(tokenizer: Tokenizer) -> None:
    of, many, other = (tokenizer.encode(text)[0] for text in (" of", " in", "("))
    step = StepTree(tree_of([of, many, other], 2), [of, many, other], [" of", " in", "("], 2, False)
    got = speculative_tree(tokenizer, step).model_dump()
    assert [(node["status"], node.get("pruned_by"), node["parent"]) for node in got["nodes"]] == [
        ("root", None, None),
        ("accepted", None, 0),
        ("accepted", None, 1),
        ("pruned", "cost", 0),
        ("pruned", "path_prob", 2),
    ]
    assert got["nodes"][1] == {
        "parent": 0, "depth": 1, "token_id": of, "text": " of", "draft_prob": 0.5, "weight": 0.75, "status": "accepted",
    }  # fmt: skip
    assert got["nodes"][3]["draft_prob"] == 0.3333
    assert got["nodes"][4] | {"depth": 3} == got["nodes"][4] and got["nodes"][4]["token_id"] is None
    assert [(token["origin"], token["depth"]) for token in got["tokens"]] == [
        ("accepted", 1), ("accepted", 2), ("bonus", 3),
    ]  # fmt: skip
    assert (got["is_copied"], got["draft_ms"], got["verify_ms"]) == (False, 1.25, 2.5)


def test_token_0_is_a_token(tokenizer: Tokenizer) -> None:
    """Only a negative id stands for children that were not drafted."""
    got = speculative_tree(tokenizer, StepTree(tree_of([0, 301, 302], 2), [0, 301, 302], ["", "a", "b"], 2, False))
    assert (got.nodes[1].token_id, got.nodes[1].text) == (0, tokenizer.token_text(0).text)


def test_a_copy_is_told_from_a_draft(tokenizer: Tokenizer) -> None:
    got = speculative_tree(tokenizer, StepTree(tree_of([300, 301], 1), [300, 301], ["a", "b"], 1, True))
    assert got.is_copied and [token.origin for token in got.tokens] == ["copied", "bonus"]


@pytest.mark.parametrize("stop", [(), ("return",), ("x + 1",)])
def test_the_tokens_texts_make_the_answer(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    """Also where characters take several tokens, and where a stop string holds text back or cuts it."""
    ids = [*tokenizer.encode(ANSWER), 0]
    running = Generation(submit=Submit(id=1, prompt=[5], max_tokens=64), tokenizer=tokenizer)
    running = Generation(submit=running.submit, tokenizer=tokenizer, stop=stop)
    for begin in range(0, len(ids), 3):
        part = ids[begin : begin + 3]
        is_last = part[-1] == 0
        end = {"finish_reason": "stop", "stop_token": 0} if is_last else {}
        delta = running.process(TokenChunk(id=1, tokens=part, num_accepted=2, tree=tree_of(part, 2), **end))
        assert "".join(delta.tree.texts) == delta.text and len(delta.tree.texts) == len(delta.token_ids)
        if delta.finish_reason:
            break
    assert "".join(text for tree in running.trees for text in tree.texts) == running.text
    assert running.text == (ANSWER if not stop else ANSWER[: ANSWER.index(stop[0])])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_whole_answer_has_every_step(http: httpx2.Client, path: str) -> None:
    prompt = {"prompt": "def"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    answer = http.post(path, json=prompt | ASKED).json()
    plain = http.post(path, json=prompt | {"max_tokens": 64}).json()
    [choice] = answer["choices"]
    trees = [SpeculativeTree.model_validate(tree) for tree in choice.pop("speculative_trees")]
    assert texts(trees) == ANSWER and len(trees) > 3
    assert choice == plain["choices"][0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_one_tree_a_step(http: httpx2.Client, path: str) -> None:
    prompt = {"prompt": "def"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    kind = ChatCompletionChunk if "chat" in path else CompletionChunk
    *events, done = stream(http, path, **prompt, **ASKED)
    assert done == "[DONE]"
    chunks = [kind.model_validate(event) for event in events]
    trees = [tree for chunk in chunks for tree in chunk.choices[0].speculative_trees or []]
    assert texts(trees) == "".join(chunk.text for chunk in chunks) == ANSWER
    with_trees = [chunk for chunk in chunks if chunk.choices[0].speculative_trees]
    assert len(with_trees) == len(trees)


def test_each_choice_has_its_own_trees(http: httpx2.Client) -> None:
    answer = CompletionResponse.model_validate(
        http.post("/v1/completions", json={"prompt": "a", "n": 2} | ASKED).json()
    )
    assert [texts(choice.speculative_trees) for choice in answer.choices] == [ANSWER, ANSWER]


def test_nobody_else_gets_or_pays_for_trees(http: httpx2.Client, service: FakeService) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "return_speculative_trees": False}).json()
    assert "speculative_trees" not in answer["choices"][0]
    assert service.engine.submitted[-1].has_trees is False
    for event in stream(http, "/v1/completions", prompt="a")[:-1]:
        assert "speculative_trees" not in event["choices"][0]


@pytest.mark.parametrize("value", ["yes", 1, [], {}, "true"])
def test_another_value_than_true_or_false_is_refused(http: httpx2.Client, value: Any) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "return_speculative_trees": value})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "return_speculative_trees" and error["type"] == "invalid_request_error"


def test_accepted_tokens_are_told_from_the_bonus(own: Callable[..., FakeService]) -> None:
    with own(engine={"drafts": True}).http() as http:
        answer = CompletionResponse.model_validate(http.post("/v1/completions", json={"prompt": "a"} | ASKED).json())
    first = answer.choices[0].speculative_trees[0]
    assert [token.origin for token in first.tokens] == ["accepted", "accepted", "bonus"]
    accepted = [node.token_id for node in first.nodes if node.status == "accepted"]
    assert accepted == [token.token_id for token in first.tokens[:2]]
