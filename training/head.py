"""Train an EAGLE-3 head for a target that this engine serves.

    python -m training.head --target smollm2 --minutes 120 --out secateur/bundled/smollm2-eagle3

Two stages; each continues where an earlier call stopped:
  answers    the target answers questions in this engine, a third of them greedily, the others at temperature 1; it
             completes half of the questions itself
  train      the head is trained by the training-time test for `--minutes`, which set the learning-rate schedule

The head is written to `--out` after every eighth of the time, so that it can be used at any moment. Without the state
of an earlier call in `--data`, training starts from the head in `--out`, if there is one.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cluster.bench.runner import GenerationJob, Runner
from cluster.convert import engine_config, fetch_weights, with_tokenizer
from secateur.config import EngineArgs
from training.eagle3 import KeyValue, TrainableEagle3Head, feature_layers, head_config
from training.language_model import mixed_precision
from training.questions import Conversation, make_questions
from training.schedule import Optimisers, TimeBudget
from workers.settings import SamplingSettings

logger = logging.getLogger("head")

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_STEPS = 5
"""Unrolled steps of the training-time test."""
FIRST_STEPS = 2
"""Unrolled steps in the first half of the time, which sees more tokens then."""
STEP_DISCOUNT = 0.9
LEAST_ACCEPTANCE = 1e-4
"""A position with less, where the target's probable tokens are not in the draft vocabulary, has no gradient."""
MUON_LR = 0.05
"""With batches of 8 rows: after 40,000 tokens, agreement at the first step was 0.07 with 0.006, 0.23 with 0.02 and 0.26
with 0.05. With 32 rows 0.02 is better."""
ROW_LENGTH = 448
NUM_HELD_OUT = 128
"""Rows that measure agreement and are not learned from."""
GREEDY_SHARE = 1 / 3
QUESTION_TOKENS = 128
"""A question that the target has not completed after so many tokens is dropped."""
QUESTION_TEMPERATURE = 0.8
"""At temperature 1 a third of the target's own questions make no sense."""
STATE = "head.pt"
RECORD = "training.json"
"""Beside the head: the coverage of its vocabulary, agreement and acceptance by the number of tokens seen."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="a model as for `secateur serve` [%(default)s]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stage", choices=("answers", "train", "all"), default="all")
    parser.add_argument("--conversations", type=int, default=4000, help="to have answered in all [%(default)s]")
    parser.add_argument("--answer-minutes", type=float, default=float("inf"), help="then start no more")
    parser.add_argument("--max-tokens", type=int, default=192, help="of an answer [%(default)s]")
    parser.add_argument("--engines", type=int, default=1, help="that answer at a time [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=48, help="answers at a time in each [%(default)s]")
    parser.add_argument("--dtype", default="bfloat16", help="of the target while it answers [%(default)s]")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training [%(default)s]")
    parser.add_argument("--batch-rows", type=int, default=8, help="conversations of a training step [%(default)s]")
    parser.add_argument("--draft-vocab", type=int, default=4864, help="of a new head, in tokens [%(default)s]")
    parser.add_argument("--intermediate-size", type=int, help="of a new head's MLP [the target's]")
    parser.add_argument("--muon-lr", type=float, default=MUON_LR, help="[%(default)s]")
    parser.add_argument("--data", type=Path, default=REPOSITORY / "training" / ".data" / "head")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "secateur" / "bundled" / "smollm2-eagle3")
    return parser.parse_args()


def target_args(options: argparse.Namespace, **settings: object) -> EngineArgs:
    """Return the target's engine arguments with these settings."""
    return EngineArgs.load({"model": options.target, "device": options.device, "no_speculation": True, **settings})


# -- answers ---------------------------------------------------------------------------------------------------------


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


# -- training --------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Holds R conversations, each ending in an answer, cut or padded to N tokens, on the CPU."""

    tokens_RN: Tensor  # int32
    begins_R: Tensor  # the answer's first position
    ends_R: Tensor  # the position behind its last


class Batch(NamedTuple):
    """Holds what the head reads of B rows with N tokens, and learns where one of A tokens of answers comes next.

    What selects is on the CPU, so that the host need not wait for the device.
    """

    embeds_BNH: Tensor
    features_BNF: Tensor
    is_answer_BN: Tensor  # bool, on the CPU: the next token is one of the answer
    index_BN: Tensor  # on the CPU: the position's index among the A
    favourite_A: Tensor  # the target's most likely next token
    law_AD: Tensor  # the target's probabilities of the draft vocabulary, of a sum of at most 1


def load_target(options: argparse.Namespace) -> LlamaForCausalLM:
    """Load the target in bfloat16, frozen; on a GPU its layers are compiled."""
    args = target_args(options)
    config = engine_config(args)
    fetch_weights(args, config)
    target = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=torch.bfloat16)
    target.to(options.device).eval().requires_grad_(False)
    if options.device == "cuda":
        for layer in target.model.layers:
            layer.compile(dynamic=True)
    return target


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to the device without waiting for what the device does."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def read_rows(options: argparse.Namespace, padding: int) -> Rows:
    """Read the answers that fit."""
    lines = [line for line in read_lines(options.data) if len(line["prompt"]) < ROW_LENGTH - 32 and line["answer"]]
    lines.sort(key=lambda line: random.Random(str(line["id"])).random())  # turns of one conversation stay together
    tokens = np.full((len(lines), ROW_LENGTH), padding, np.int32)
    begins, ends = (np.empty(len(lines), np.int64) for _ in range(2))
    for row, line in enumerate(lines):
        own = (line["prompt"] + line["answer"])[:ROW_LENGTH]
        tokens[row, : len(own)], begins[row], ends[row] = own, len(line["prompt"]), len(own)
    return Rows(*(torch.from_numpy(array) for array in (tokens, begins, ends)))


def batches(begins: list[int], chosen: list[int], num_rows: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield shuffled batches of rows without end, each of rows whose answers begin at about the same position."""
    while True:
        rng.shuffle(chosen)
        for start in range(0, len(chosen), 8 * num_rows):
            part = sorted(chosen[start : start + 8 * num_rows], key=begins.__getitem__)
            some = [part[first : first + num_rows] for first in range(0, len(part) - num_rows + 1, num_rows)]
            rng.shuffle(some)
            yield from some


@torch.no_grad()
def read_target(target: LlamaForCausalLM, rows: Rows, chosen: list[int], draft_ids: Tensor) -> Batch:
    """Run the target over some rows, cut to the longest of them."""
    own, device = torch.tensor(chosen), draft_ids.device
    begins, ends = rows.begins_R[own, None], rows.ends_R[own, None]
    length = int(ends.max())
    following = torch.arange(1, length + 1)
    is_answer = (following >= begins) & (following < ends)
    tokens = send(rows.tokens_RN[own, :length].long(), device)
    output = target.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    logits = target.lm_head(output.last_hidden_state.flatten(0, 1)[send(is_answer.flatten().nonzero()[:, 0], device)])
    normaliser_A1 = torch.cat([part.float().logsumexp(-1, keepdim=True) for part in logits.split(1024)])
    return Batch(
        embeds_BNH=target.model.embed_tokens(tokens).float(),
        features_BNF=torch.cat([output.hidden_states[n] for n in feature_layers(len(target.model.layers))], -1).float(),
        is_answer_BN=is_answer,
        index_BN=(is_answer.flatten().cumsum(0) - 1).view_as(is_answer),
        favourite_A=logits.argmax(-1),
        law_AD=(logits[:, draft_ids].float() - normaliser_A1).exp(),
    )


def unrolled_loss(
    head: TrainableEagle3Head, batch: Batch, first: int, num_steps: int = NUM_STEPS
) -> tuple[Tensor, Tensor]:
    """Return the loss, and each step's agreement and acceptance [2, num_steps].

    Agreement is the share of answer tokens for which the most likely tokens are equal. Acceptance is the probability
    that a token drafted at temperature 1 is accepted: the sum of the smaller of both probabilities of each token. The
    loss is its negative logarithm (Samarin et al., "LK losses", 2026). first: the earliest start of a draft.
    """
    num_starts = batch.embeds_BNH.shape[1] - 1 - num_steps
    hidden = head.fc(batch.features_BNF[:, :num_starts])
    cache: list[KeyValue] = []
    total, agreement, acceptance = torch.zeros((), device=hidden.device), [], []
    for s in range(num_steps):
        begin = 1 + s if s == 0 else 1 + s + first
        hidden = head.step(batch.embeds_BNH[:, begin : 1 + s + num_starts], hidden, cache, first)
        window = slice(1 + s + first, 1 + s + num_starts)
        is_answer = batch.is_answer_BN[:, window]
        answers = send(is_answer.flatten().nonzero()[:, 0], hidden.device)
        index = send(batch.index_BN[:, window][is_answer], hidden.device)
        favourite = batch.favourite_A[index]
        logits = head.lm_head(head.norm(hidden.flatten(0, 1)[answers])).float()
        accepted = torch.minimum(logits.softmax(-1), batch.law_AD[index]).sum(-1)
        total = total - STEP_DISCOUNT**s * accepted.clamp(min=LEAST_ACCEPTANCE).log().mean()
        agreement.append((head.draft_ids[logits.argmax(-1)] == favourite).float().mean())
        acceptance.append(accepted.mean())
    return total, torch.stack([torch.stack(agreement), torch.stack(acceptance)]).detach()


def new_head(target: LlamaForCausalLM, draft_ids: Tensor, intermediate_size: int | None) -> TrainableEagle3Head:
    """Initialise a head from the target's last layer and output layer; `fc` selects the highest feature.

    A narrower MLP takes the first neurons of the target's.
    """
    config = copy.deepcopy(target.config)
    config.intermediate_size = intermediate_size or config.intermediate_size
    head = TrainableEagle3Head(config, draft_ids).to(draft_ids.device)
    hidden, last = config.hidden_size, target.model.layers[-1]
    with torch.no_grad():
        head.fc.weight.zero_()[:, 2 * hidden :] += torch.eye(hidden, device=draft_ids.device)
        for name, own in head.midlayer.mlp.named_parameters():
            own.copy_(last.mlp.get_parameter(name)[: own.shape[0], : own.shape[1]])
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(head.midlayer.self_attn, name).weight[:, hidden:].copy_(getattr(last.self_attn, name).weight)
        head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight[draft_ids])
    return head


def starting_head(
    options: argparse.Namespace, target: LlamaForCausalLM, counts: Counter[int]
) -> tuple[TrainableEagle3Head, dict]:
    """Return the head of an earlier call, else the one in `--out`, else a new one; with its tokens seen and its log.

    counts: how often each token occurs in answers.
    """
    state_file, weights_file = options.data / STATE, options.out / "model.safetensors"
    if state_file.exists():
        state = torch.load(state_file, map_location=options.device)
        weights = state.pop("head")
    elif weights_file.exists():
        log = json.loads((options.out / RECORD).read_text())["log"]
        weights, state = load_file(weights_file), {"tokens": log[-1]["tokens"], "log": log}
    else:
        draft_ids = sorted(token for token, _ in counts.most_common(options.draft_vocab))
        head = new_head(target, torch.tensor(draft_ids, device=options.device), options.intermediate_size)
        return head, {"tokens": 0, "log": []}
    draft_ids = weights["d2t"] + torch.arange(len(weights["d2t"]), device=weights["d2t"].device)
    head = new_head(target, draft_ids.to(options.device), len(weights["midlayer.mlp.gate_proj.weight"]))
    head.load_state_dict(weights)
    return head, state


def train(options: argparse.Namespace, target: LlamaForCausalLM) -> None:
    """Train for `--minutes`."""
    torch.manual_seed(3)
    torch.set_float32_matmul_precision("high")
    budget = TimeBudget.from_now(60 * options.minutes)
    rows = read_rows(options, target.config.eos_token_id)
    begins, ends = rows.begins_R.tolist(), rows.ends_R.tolist()
    held_out, chosen = list(range(NUM_HELD_OUT)), list(range(NUM_HELD_OUT, len(begins)))
    if len(chosen) < options.batch_rows:
        raise SystemExit(f"{len(begins)} answers fit; have {NUM_HELD_OUT + options.batch_rows} or more answered")
    counts = Counter(
        token
        for tokens, begin, end in zip(rows.tokens_RN.tolist(), begins, ends, strict=True)
        for token in tokens[begin:end]
    )
    head, state = starting_head(options, target, counts)
    coverage = sum(counts[token] for token in head.draft_ids.tolist()) / counts.total()
    logger.info("train: %d rows, %d answer tokens, coverage %.4f", len(chosen), counts.total(), coverage)
    optimisers = Optimisers(head, budget, "head", options.muon_lr)
    source = batches(begins, chosen, options.batch_rows, random.Random(len(state["log"])))
    next_save = 0.0

    def loss_of(own: list[int], num_steps: int) -> tuple[Tensor, Tensor]:
        first = max(min(begins[row] for row in own) - 1 - num_steps, 0)
        batch = read_target(target, rows, own, head.draft_ids)
        with mixed_precision(head.draft_ids.device):
            return unrolled_loss(head, batch, first, num_steps)

    while True:
        if budget.fraction() >= next_save:
            with torch.no_grad():
                parts = [held_out[start : start + 8] for start in range(0, len(held_out), 8)]
                seen = torch.stack([loss_of(part, NUM_STEPS)[1] for part in parts]).mean(0).tolist()
            agreement, acceptance = ([round(value, 4) for value in values] for values in seen)
            entry = {"tokens": state["tokens"], "agreement": agreement, "acceptance": acceptance}
            state["log"] = [*(each for each in state["log"] if each["tokens"] < state["tokens"]), entry]
            torch.save(state | {"head": head.state_dict()}, options.data / STATE)
            save(head, options.out, {"coverage": round(coverage, 4), "log": state["log"]})
            logger.info("train: %s", state["log"][-1])
            next_save += 0.125
        if budget.fraction() >= 1:
            return
        own = next(source)
        loss, _ = loss_of(own, FIRST_STEPS if budget.fraction() < 0.5 else NUM_STEPS)
        num_tokens = sum(ends[row] - begins[row] for row in own)
        optimisers.step(loss, num_tokens)
        state["tokens"] += num_tokens


def save(head: TrainableEagle3Head, folder: Path, record: dict) -> None:
    """Write config.json, model.safetensors (bfloat16, atomically) and training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / "new.safetensors", metadata={"format": "pt"})
    (folder / "new.safetensors").chmod(0o644)
    (folder / "new.safetensors").replace(folder / "model.safetensors")
    config = head_config(head.config) | {
        "bos_token_id": head.config.bos_token_id,
        "pad_token_id": head.config.eos_token_id,
        "draft_vocab_size": len(head.draft_ids),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    """Run the requested stages."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    options = parse_arguments()
    options.data.mkdir(parents=True, exist_ok=True)
    if options.stage != "train":
        write_answers(options)
    if options.stage != "answers":
        train(options, load_target(options))


if __name__ == "__main__":
    main()
