"""`secateur.LLM`: the same engine without a server, under vLLM's names."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from cluster.engine.process_host import ProcessHost
from secateur import LLM, ConfigError, RequestOutput, SamplingParams, SecateurError, ServiceUnavailableError

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["def quicksort(items):\n", "class Point:\n", "import os\n"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, max_num_seqs=4) as own:
        yield own


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(max_model_len=512, max_num_seqs=4, no_speculation=True) as own:
        yield own


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [answer.text for output in outputs for answer in output.outputs]


def test_outputs_come_in_order_and_equal_those_without_speculation(llm: LLM, plain: LLM) -> None:
    many = PROMPTS * 6  # more than run at once
    always = SamplingParams(temperature=0, max_tokens=24, speculative={"tree_prune": "off"})
    outputs = llm.generate(many, always, use_tqdm=False)
    assert [output.prompt for output in outputs] == many
    assert texts(outputs) == texts(plain.generate(many, GREEDY, use_tqdm=False))
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
    assert outputs[0].speculative.num_accepted_tokens > 0


def test_one_prompt_may_be_text_ids_or_a_dict(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    ids = output.prompt_token_ids
    for same in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt": PROMPTS[0]}]):
        assert texts(llm.generate(same, GREEDY, use_tqdm=False)) == [output.outputs[0].text]


def test_answers_follow_the_structure_that_each_prompt_asks_for(llm: LLM, plain: LLM) -> None:
    asked = [{"choice": ["yes", "no"]}, {"regex": "[0-9]{4}"}, {"json": {"enum": [None, 5]}}]
    params = [SamplingParams(temperature=1, seed=4, max_tokens=40, structured_outputs=own) for own in asked]
    told = texts(llm.generate(PROMPTS[:1] * 3, params, use_tqdm=False))
    assert told[0] in ("yes", "no") and len(told[1]) == 4 and told[1].isdigit() and told[2] in ("null", "5")
    assert told == texts(plain.generate(PROMPTS[:1] * 3, params, use_tqdm=False))


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=1, max_tokens=9, n=2, seed=7, ignore_eos=True),
    ]
    first, second = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert len(first.outputs[0].token_ids) == 3 and first.outputs[0].finish_reason == "length"
    assert [answer.index for answer in second.outputs] == [0, 1]
    assert second.outputs[0].token_ids != second.outputs[1].token_ids
    again = llm.generate(PROMPTS[1], params[1], use_tqdm=False)[0]
    assert texts([again]) == texts([second])


def test_log_probabilities_are_by_token_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    (answer,) = output.outputs
    assert answer.logprobs is not None and len(answer.logprobs) == 5
    assert all(token in own and len(own) == 2 for token, own in zip(answer.token_ids, answer.logprobs, strict=True))
    total = sum(own[token].logprob for token, own in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for token, scores in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert scores is not None and token in scores


def test_log_probabilities_of_chosen_tokens_are_those_among_the_likeliest(llm: LLM) -> None:
    asked = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    ((most,), (chosen,)) = (
        llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs
        for params in (SamplingParams(logprobs=20, **asked), SamplingParams(logprob_token_ids=[4, 9, 300], **asked))
    )
    assert most.token_ids == chosen.token_ids and len(chosen.logprobs) == 5
    num_compared = 0
    for token, all_, own in zip(most.token_ids, most.logprobs, chosen.logprobs, strict=True):
        assert own.keys() == {token, 4, 9, 300} and own[token].rank == 1
        assert {own[id].rank for id in own if id != token} == {None}
        for id in own.keys() & all_.keys():
            num_compared += 1
            assert own[id].logprob == pytest.approx(all_[id].logprob, abs=1e-4)
    assert num_compared >= 5


def test_a_conversation_is_rendered_by_the_models_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is a list?"}]
    one = llm.chat(conversation, GREEDY, use_tqdm=False)
    two = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert texts(two) == texts(one) * 2
    assert len(one[0].prompt_token_ids) > len(
        llm.generate("What is a list?", GREEDY, use_tqdm=False)[0].prompt_token_ids
    )
    assert one[0].prompt is None


def test_without_a_limit_an_answer_runs_to_its_end_or_to_that_of_the_context(llm: LLM) -> None:
    (output,) = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False
    )
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 512


@pytest.mark.parametrize(
    ("prompts", "params", "problem"),
    [
        (["a", "b"], [GREEDY], "sampling_params: 1 for 2 prompts"),
        ({"text": "a"}, GREEDY, "prompts: a dict has exactly one key"),
        ([[10**6]], GREEDY, "prompt"),
        ("a b c " * 600, GREEDY, "prompt"),
        ("a", SamplingParams(n=2, temperature=0), "n: must be 1"),
        ("a", SamplingParams(structured_outputs={"regex": "("}), "unclosed group"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_generated(
    llm: LLM, prompts: object, params: object, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"speculative": {"colour": 1}}, "colour"),
        ({"colour": 1}, "unknown key 'colour'"),
    ],
)
def test_a_wrong_parameter_is_told_at_once(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SamplingParams(**params)


def test_nothing_is_left_of_an_engine_that_is_closed_or_forgotten() -> None:
    before = set(psutil.Process().children(recursive=True))

    def own_children() -> set[psutil.Process]:
        return {child for child in psutil.Process().children(recursive=True) if child not in before}

    closed = LLM(max_model_len=256, no_speculation=True)
    assert own_children()
    closed.close()
    closed.close()
    assert not own_children()
    with pytest.raises(RuntimeError, match="closed"):
        closed.generate("a")
    forgotten = LLM(max_model_len=256, no_speculation=True)
    assert own_children()
    del forgotten
    gc.collect()
    assert not own_children()


@contextmanager
def verifier_killed_in_a_step(llm: LLM) -> Iterator[None]:
    """Kill the first rank as soon as a request runs."""
    client = llm._engine._service.engine
    assert client.ready is not None
    pid = client.ready.topology[0]["pid"]

    def kill() -> None:
        while not client.stats.num_running:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    yield
    killing.join()


def test_a_lost_engine_is_replaced_and_changes_no_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True, seed=3)
    expected = llm.generate(PROMPTS * 3, params, use_tqdm=False)
    with verifier_killed_in_a_step(llm):
        answers = llm.generate(PROMPTS * 3, params, use_tqdm=False)
    assert [answer.outputs[0].token_ids for answer in answers] == [one.outputs[0].token_ids for one in expected]


def test_an_engine_that_cannot_be_replaced_is_an_error_now_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(max_model_len=512, no_speculation=True) as own:

        async def fail(*_: object, **options: object) -> None:
            raise RuntimeError("no device is left")

        monkeypatch.setattr(ProcessHost, "start", fail)
        with verifier_killed_in_a_step(own), pytest.raises(SecateurError, match="verifier 0"):
            own.generate(PROMPTS * 40, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
        with pytest.raises(ServiceUnavailableError, match="verifier 0"):
            own.generate("a", use_tqdm=False)


def test_a_script_that_never_closes_it_ends_all_the_same() -> None:
    """The example of the module, as a user would run it, with a progress bar on stderr."""
    script = (
        "from secateur import LLM, SamplingParams\n"
        "llm = LLM(max_model_len=256)\n"
        "for output in llm.generate(['def main(', 'class A'], SamplingParams(temperature=0, max_tokens=8)):\n"
        "    print(repr(output.prompt), len(output.outputs[0].token_ids))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["'def main(' 8", "'class A' 8"]
    assert "prompts: 100%" in done.stderr


def test_a_wrong_setting_starts_nothing() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="max_modellen"):
        LLM(max_modellen=3)
