"""Collects what a head learns from: conversations that the target answers in this engine, one line per turn.

    write_answers(options)               goes on until `--conversations` are answered, or `--answer-minutes` have passed
    read_lines(folder) -> [{"id": of the conversation, "prompt": token ids, "answer": token ids}, ...]

The target answers a third of the questions greedily, the others at temperature 1; it completes half of them itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from cluster.bench.runner import GenerationJob, Runner
from cluster.convert import engine_config, fetch_weights, with_tokenizer
from secateur.config import EngineArgs
from training.questions import Conversation, make_questions
from workers.settings import SamplingSettings

logger = logging.getLogger(__name__)

GREEDY_SHARE = 1 / 3
QUESTION_TOKENS = 128
"""A question that the target has not completed after so many tokens is dropped."""
QUESTION_TEMPERATURE = 0.8
"""At temperature 1 a third of the target's own questions make no sense."""


def target_args(options: argparse.Namespace, **settings: object) -> EngineArgs:
    """Return the target's engine arguments with these settings."""
    return EngineArgs.load({"model": options.target, "device": options.device, "no_speculation": True, **settings})


def write_answers(options: argparse.Namespace) -> None:
    """Have all questions answered, each engine's share into a file of its own, one line per turn."""
    done = {line["id"] for line in read_lines(options.data)}
    questions = [(i, own) for i, own in enumerate(make_questions(options.conversations, seed=1)) if i not in done]
    if not questions:
        return
    random.Random(1).shuffle(questions)  # every engine gets all kinds
    args = target_args(options)
    fetch_weights(args, engine_config(args))
    shares = [questions[number :: options.engines] for number in range(options.engines)]
    files = [options.data / f"answers-{number}.jsonl" for number in range(options.engines)]
    with ProcessPoolExecutor(options.engines, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(answer_share, [options] * options.engines, shares, files))


def answer_share(options: argparse.Namespace, questions: list[tuple[int, Conversation]], file: Path) -> None:
    """Append the answers of one engine to `file`: {"id": of the conversation, "prompt": token ids, "answer"}."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    args = target_args(options, dtype=options.dtype, max_model_len=1536)
    config, tokenizer = with_tokenizer(args, engine_config(args))
    opening = common_prefix(*(tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("a", "b")))

    def job(prompt: list[int], number: int, temperature: float, max_tokens: int) -> GenerationJob:
        sampling = SamplingSettings(temperature=temperature, seed=number)
        return GenerationJob(prompt=prompt, max_tokens=max_tokens, sampling=sampling, ignore_eos=False)

    cut_torn_line(file)
    with Runner(replace(config, max_num_seqs=options.concurrency)) as runner, file.open("a") as out:
        began = time.monotonic()
        for begin in range(0, len(questions), 4 * options.concurrency):
            if time.monotonic() - began > 60 * options.answer_minutes:
                return
            started, num_tokens = time.monotonic(), 0
            share = dict(questions[begin : begin + 4 * options.concurrency])
            part = {number: list(own.turns) for number, own in share.items()}
            asking = [number for number, own in share.items() if own.is_begun]
            begun = [opening + tokenizer.encode(part[number][0], add_special_tokens=False) for number in asking]
            jobs = [
                job(prompt, number, QUESTION_TEMPERATURE, QUESTION_TOKENS)
                for number, prompt in zip(asking, begun, strict=True)
            ]
            for number, question in zip(asking, runner.run(jobs, options.concurrency), strict=True):
                part[number][0] = (part[number][0] + tokenizer.decode(question.tokens)).strip()
                if question.finish_reason == "length" or not part[number][0]:
                    del part[number]
            chats: dict[int, list[dict[str, str]]] = {number: [] for number in part}
            lines = [{"id": number, "prompt": [], "answer": []} for number in asking if number not in part]
            for turn in range(2):
                own = [number for number, turns in part.items() if len(turns) > turn]
                for number in own:
                    chats[number].append({"role": "user", "content": part[number][turn]})
                prompts = [tokenizer.encode_chat(chats[number]) for number in own]
                jobs = [
                    job(prompt, number, float(random.Random(number).random() >= GREEDY_SHARE), options.max_tokens)
                    for number, prompt in zip(own, prompts, strict=True)
                ]
                answers = [answer.tokens for answer in runner.run(jobs, options.concurrency)]
                for number, prompt, answer in zip(own, prompts, answers, strict=True):
                    lines.append({"id": number, "prompt": prompt, "answer": answer})
                    chats[number].append({"role": "assistant", "content": tokenizer.decode(answer)})
                    num_tokens += len(answer)
            out.writelines(json.dumps(line) + "\n" for line in lines)
            out.flush()
            rate = num_tokens / (time.monotonic() - started)
            logger.info("answers: %d more, %.0f tokens/s", len(part), rate)


def common_prefix(left: list[int], right: list[int]) -> list[int]:
    """Return the tokens that both begin with."""
    same = [a == b for a, b in zip(left, right, strict=False)]
    return left[: same.index(False) if False in same else len(same)]


def cut_torn_line(file: Path) -> None:
    """Remove what a killed process wrote behind the last complete line."""
    file.touch()
    content = file.read_bytes()
    with file.open("r+b") as stream:
        stream.truncate(content.rfind(b"\n") + 1)


def read_lines(folder: Path) -> list[dict]:
    """Read the complete lines of all answers; a question that was dropped has no prompt and no answer."""
    texts = (file.read_text() for file in sorted(folder.glob("answers-*.jsonl")))
    return [json.loads(line) for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]
