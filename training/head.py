"""Train an EAGLE-3 head for a target that this engine serves.

    python training/head.py --target smollm2 --minutes 120 --out secateur/bundled/smollm2-eagle3

Three stages; each continues where an earlier call stopped:
  answers    the target answers questions in this engine, half of them greedily and half at temperature 1; those in
             TARGET-answers.jsonl.xz beside this file need not be answered again
  features   the target runs over all conversations once; the head's inputs and targets are written to disk
  train      the head is trained by the training-time test for `--minutes`, which set the learning-rate schedule

The head is written to `--out` after every eighth of the time, so that it can be used at any moment. Without the state
of an earlier call in `--data`, training starts from the head in `--out`, if there is one.
"""

from __future__ import annotations

import argparse
import json
import logging
import lzma
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from eagle3 import TrainableEagle3Head, feature_layers, head_config
from questions import make_questions
from safetensors.torch import load_file, save_file
from schedule import Optimisers, TimeBudget
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cluster.bench.runner import GenerationJob, Runner
from cluster.convert import engine_config, fetch_weights, with_tokenizer
from secateur.config import EngineArgs
from workers.types import SamplingSettings

logger = logging.getLogger("head")

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_STEPS = 5
"""Unrolled steps of the training-time test."""
FIRST_STEPS = 2
"""Unrolled steps in the first half of the time, which sees twice as many tokens then."""
STEP_DISCOUNT = 0.9
MUON_LR = 0.05
"""After 40,000 tokens, agreement at the first step was 0.07 with 0.006, 0.23 with 0.02 and 0.26 with 0.05."""
ROW_LENGTH = 448
BATCH_ROWS = 8
HELD_OUT_EVERY = 50
STATE = "head.pt"
RECORD = "training.json"
"""Beside the head: the coverage of its vocabulary, and the agreement by the number of tokens seen."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="a model as for `secateur serve` [%(default)s]")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training [%(default)s]")
    parser.add_argument("--conversations", type=int, default=4000, help="to have answered in all [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=192, help="of an answer [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=48, help="answers at a time [%(default)s]")
    parser.add_argument("--draft-vocab", type=int, default=4864, help="tokens that the head can draft [%(default)s]")
    parser.add_argument("--dtype", default="bfloat16", help="of the target while it answers [%(default)s]")
    parser.add_argument("--stage", choices=("answers", "features", "train", "all"), default="all")
    parser.add_argument("--data", type=Path, default=REPOSITORY / "training" / ".data" / "head")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "secateur" / "bundled" / "smollm2-eagle3")
    return parser.parse_args()


def target_args(options: argparse.Namespace, **settings: object) -> EngineArgs:
    """Return the target's engine arguments with these settings."""
    return EngineArgs.load({"model": options.target, "device": "cpu", "no_speculation": True, **settings})


# -- answers ---------------------------------------------------------------------------------------------------------


def write_answers(options: argparse.Namespace) -> None:
    """Append to answers.jsonl until all questions are answered, one line per turn: {"id", "prompt", "answer"}."""
    file = options.data / "answers.jsonl"
    if (kept := Path(__file__).with_name(f"{options.target}-answers.jsonl.xz")).exists() and not file.exists():
        file.write_bytes(lzma.decompress(kept.read_bytes()))
    done = {line["id"] for line in read_lines(file)}
    questions = [(i, own) for i, own in enumerate(make_questions(options.conversations, seed=1)) if i not in done]
    if not questions:
        return
    args = target_args(options, dtype=options.dtype, max_model_len=1536)
    config, tokenizer = with_tokenizer(args, engine_config(args))
    fetch_weights(args, config)
    with Runner(replace(config, max_num_seqs=options.concurrency)) as runner, file.open("a") as out:
        for begin in range(0, len(questions), 8 * options.concurrency):
            began, num_tokens = time.monotonic(), 0
            part = dict(questions[begin : begin + 8 * options.concurrency])
            chats: dict[int, list[dict[str, str]]] = {number: [] for number in part}
            lines = []
            for turn in range(2):
                own = [number for number, question in part.items() if len(question.turns) > turn]
                for number in own:
                    chats[number].append({"role": "user", "content": part[number].turns[turn]})
                prompts = [tokenizer.encode_chat(chats[number]) for number in own]
                jobs = [
                    GenerationJob(
                        prompt=prompt,
                        max_tokens=options.max_tokens,
                        sampling=SamplingSettings(temperature=float(number % 2), seed=number),
                        ignore_eos=False,
                    )
                    for number, prompt in zip(own, prompts, strict=True)
                ]
                answers = [answer.tokens for answer in runner.run(jobs, options.concurrency)]
                for number, prompt, answer in zip(own, prompts, answers, strict=True):
                    lines.append({"id": number, "prompt": prompt, "answer": answer})
                    chats[number].append({"role": "assistant", "content": tokenizer.decode(answer)})
                    num_tokens += len(answer)
            out.writelines(json.dumps(line) + "\n" for line in lines)
            out.flush()
            rate = num_tokens / (time.monotonic() - began)
            logger.info("answers: %d of %d questions, %.0f tokens/s", begin + len(part), len(questions), rate)


def read_lines(file: Path) -> list[dict]:
    """Read the complete lines of a file; a truncated last line is dropped."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


# -- features --------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Rows of one length, as arrays on disk: R rows, N tokens, H hidden."""

    tokens_RN: np.ndarray  # int64
    features_RNF: np.ndarray  # bfloat16 as uint16, F = 3 H
    final_RNH: np.ndarray  # bfloat16 as uint16: what the target's output layer reads
    favourite_RN: np.ndarray  # int64: the target's most likely next token
    is_answer_RN: np.ndarray  # bool: the target chose this token


def load_target(options: argparse.Namespace) -> LlamaForCausalLM:
    """Load the target in bfloat16, frozen."""
    args = target_args(options)
    config = engine_config(args)
    fetch_weights(args, config)
    return AutoModelForCausalLM.from_pretrained(config.model_path, dtype=torch.bfloat16).eval().requires_grad_(False)


def write_features(options: argparse.Namespace, target: LlamaForCausalLM) -> Rows:
    """Compute the rows that are not on disk yet; conversations are cut or padded to `ROW_LENGTH` tokens."""
    lines = [line for line in read_lines(options.data / "answers.jsonl") if len(line["prompt"]) < ROW_LENGTH - 32]
    hidden, count = target.config.hidden_size, len(lines)
    rows = Rows(
        *(
            _array(options.data / f"{name}.npy", (count, ROW_LENGTH, *rest), dtype)
            for name, rest, dtype in (
                ("tokens", (), np.int64),
                ("features", (3 * hidden,), np.uint16),
                ("final", (hidden,), np.uint16),
                ("favourite", (), np.int64),
                ("is_answer", (), np.bool_),
            )
        )
    )
    progress = options.data / "features.json"
    begin = json.loads(progress.read_text())["rows"] if progress.exists() else 0
    began = time.monotonic()
    for start in range(begin, count, 8):
        part = lines[start : start + 8]
        tokens = torch.full((len(part), ROW_LENGTH), target.config.eos_token_id)
        for row, line in enumerate(part):
            own = torch.tensor((line["prompt"] + line["answer"])[:ROW_LENGTH])
            tokens[row, : len(own)] = own
            rows.is_answer_RN[start + row, len(line["prompt"]) : len(own)] = True
        longest = max(min(len(line["prompt"] + line["answer"]), ROW_LENGTH) for line in part)
        with torch.inference_mode():
            output = target.model(input_ids=tokens[:, :longest], output_hidden_states=True, use_cache=False)
        layers = feature_layers(target.config.num_hidden_layers)
        features = torch.cat([output.hidden_states[layer] for layer in layers], -1)
        for array, values in ((rows.features_RNF, features), (rows.final_RNH, output.last_hidden_state)):
            array[start : start + len(part), :longest] = values.view(torch.uint16).numpy()
        favourites = [target.lm_head(final).argmax(-1) for final in output.last_hidden_state]
        rows.favourite_RN[start : start + len(part), :longest] = torch.stack(favourites).numpy()
        rows.tokens_RN[start : start + len(part)] = tokens.numpy()
        if start // 8 % 20 == 0 or start + 8 >= count:
            progress.write_text(json.dumps({"rows": start + len(part)}))
            rate = (start + len(part) - begin) / (time.monotonic() - began)
            logger.info("features: %d of %d rows, %.1f rows/s", start + len(part), count, rate)
    return rows


def _array(file: Path, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Map a file into memory, extended to `shape`."""
    file.touch()
    with file.open("r+b") as stream:
        stream.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.memmap(file, dtype=dtype, mode="r+", shape=shape)


# -- training --------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Some rows as tensors; see `Rows`."""

    tokens_BN: Tensor
    features_BNF: Tensor
    final_BNH: Tensor
    favourite_BN: Tensor
    is_answer_BN: Tensor


def batches(rows: Rows, chosen: list[int], rng: random.Random) -> Iterator[Batch]:
    """Yield shuffled batches without end, each of rows whose answers begin at about the same position."""
    begins = rows.is_answer_RN.argmax(1)
    while True:
        rng.shuffle(chosen)
        for start in range(0, len(chosen), 8 * BATCH_ROWS):
            part = sorted(chosen[start : start + 8 * BATCH_ROWS], key=begins.__getitem__)
            some = [part[first : first + BATCH_ROWS] for first in range(0, len(part) - BATCH_ROWS + 1, BATCH_ROWS)]
            rng.shuffle(some)
            yield from (batch_of(rows, sorted(own)) for own in some)


def batch_of(rows: Rows, chosen: list[int]) -> Batch:
    """Read rows from disk, cut to the longest of them."""
    tokens, favourite, is_answer = (
        torch.from_numpy(np.array(array[chosen])) for array in (rows.tokens_RN, rows.favourite_RN, rows.is_answer_RN)
    )
    features, final = (
        torch.from_numpy(np.array(array[chosen])).view(torch.bfloat16).float()
        for array in (rows.features_RNF, rows.final_RNH)
    )
    longest = int(is_answer.flip(1).int().argmax(1).neg().max()) + tokens.shape[1]
    return Batch(*(values[:, :longest] for values in (tokens, features, final, favourite, is_answer)))


def unrolled_loss(
    head: TrainableEagle3Head, target: LlamaForCausalLM, batch: Batch, num_steps: int = NUM_STEPS
) -> tuple[Tensor, list[float]]:
    """Return the cross-entropy against the target's distribution over the draft vocabulary, and each step's agreement.

    Agreement is the share of answer tokens for which the most likely tokens are equal. The loss covers answer tokens
    whose most likely target token is in the draft vocabulary. Drafts start before the first answer token at the
    earliest.
    """
    num_starts = batch.tokens_BN.shape[1] - 1 - num_steps
    embeds = target.model.embed_tokens(batch.tokens_BN).float()
    is_answer = batch.is_answer_BN.roll(-1, 1)  # position n predicts n + 1
    is_answer[:, -1] = False
    first = max(int(is_answer.int().argmax(1).min()) - num_steps, 0)
    hidden, cache = head.fc(batch.features_BNF[:, :num_starts]), []
    total, agreement = torch.zeros(()), []
    for s in range(num_steps):
        begin = 1 + s if s == 0 else 1 + s + first
        hidden = head.step(embeds[:, begin : 1 + s + num_starts], hidden, cache, first)
        window = slice(1 + s + first, 1 + s + num_starts)
        answers, favourite = is_answer[:, window], batch.favourite_BN[:, window]
        logits = head.lm_head(head.norm(hidden[answers])).float()
        with torch.no_grad():
            final = batch.final_BNH[:, window][answers].bfloat16()
            law = (final @ target.lm_head.weight[head.draft_ids].T).float().softmax(-1)
            is_counted = head.t2d[favourite[answers]]
            hits = head.draft_ids[logits.argmax(-1)] == favourite[answers]
        entropy = F.cross_entropy(logits, law, reduction="none")
        total = total + STEP_DISCOUNT**s * (entropy * is_counted).sum() / is_counted.sum().clamp(min=1)
        agreement.append(float(hits.float().mean()))
    return total, agreement


def new_head(target: LlamaForCausalLM, draft_ids: Tensor) -> TrainableEagle3Head:
    """Initialise a head from the target's last layer and output layer; `fc` selects the highest feature."""
    head = TrainableEagle3Head(target.config, draft_ids)
    hidden, last = target.config.hidden_size, target.model.layers[-1]
    with torch.no_grad():
        head.fc.weight.zero_()[:, 2 * hidden :] += torch.eye(hidden)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(head.midlayer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
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
        state = torch.load(state_file)
        weights = state.pop("head")
    elif weights_file.exists():
        log = json.loads((options.out / RECORD).read_text())["log"]
        weights, state = load_file(weights_file), {"tokens": log[-1]["tokens"], "log": log}
    else:
        draft_ids = torch.tensor(sorted(token for token, _ in counts.most_common(options.draft_vocab)))
        return new_head(target, draft_ids), {"tokens": 0, "log": []}
    head = TrainableEagle3Head(target.config, weights["d2t"] + torch.arange(len(weights["d2t"])))
    head.load_state_dict(weights)
    return head, state


def train(options: argparse.Namespace, target: LlamaForCausalLM, rows: Rows) -> None:
    """Train for `--minutes`."""
    torch.manual_seed(3)
    budget = TimeBudget.from_now(60 * options.minutes)
    counts = Counter(rows.tokens_RN[rows.is_answer_RN].tolist())
    head, state = starting_head(options, target, counts)
    coverage = sum(counts[token] for token in head.draft_ids.tolist()) / counts.total()
    held_out = list(range(0, len(rows.tokens_RN), HELD_OUT_EVERY))
    chosen = [row for row in range(len(rows.tokens_RN)) if row % HELD_OUT_EVERY]
    logger.info("train: %d rows, %d answer tokens, coverage %.4f", len(chosen), counts.total(), coverage)
    optimisers = Optimisers(head, budget, "head", MUON_LR)
    source = batches(rows, chosen, random.Random(len(state["log"])))
    next_save = 0.0
    while True:
        if budget.fraction() >= next_save:
            state["log"] = [*state["log"], evaluated(head, target, rows, held_out, state["tokens"])]
            torch.save(state | {"head": head.state_dict()}, options.data / STATE)
            save(head, options.out, {"coverage": round(coverage, 4), "log": state["log"]})
            logger.info("train: %s", state["log"][-1])
            next_save += 0.125
        if budget.fraction() >= 1:
            return
        batch = next(source)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = unrolled_loss(head, target, batch, FIRST_STEPS if budget.fraction() < 0.5 else NUM_STEPS)
        num_tokens = int(batch.is_answer_BN.sum())
        optimisers.step(loss, num_tokens)
        state["tokens"] += num_tokens


@torch.no_grad()
@torch.autocast("cpu", torch.bfloat16)
def evaluated(
    head: TrainableEagle3Head, target: LlamaForCausalLM, rows: Rows, held_out: list[int], num_tokens: int
) -> dict:
    """Return the agreement with the target's most likely token by step, on held-out rows."""
    parts = [held_out[start : start + BATCH_ROWS] for start in range(0, min(len(held_out), 60), BATCH_ROWS)]
    agreement = np.mean([unrolled_loss(head, target, batch_of(rows, part))[1] for part in parts], axis=0)
    return {"tokens": num_tokens, "agreement": [round(float(value), 4) for value in agreement]}


def save(head: TrainableEagle3Head, folder: Path, record: dict) -> None:
    """Write config.json, model.safetensors (bfloat16, atomically) and training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().contiguous()
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
    if options.stage in ("answers", "all"):
        write_answers(options)
    if options.stage in ("features", "train", "all"):
        target = load_target(options)
        rows = write_features(options, target)
        if options.stage != "features":
            train(options, target, rows)


if __name__ == "__main__":
    main()
