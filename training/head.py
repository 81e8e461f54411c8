"""Train a draft head for a target that this engine serves.

    python -m training.head --method dspark --target smollm2 --tokens 30e6 --minutes 7 --data DIR --out DIR

Two stages; each continues where an earlier call stopped, as if it had not stopped:
  answers    the target answers questions in this engine, see `training.answers`
  train      the head learns which tokens are accepted, until it has seen `--tokens` of answers, or for `--minutes`

The learning rate falls over the tokens, so that a training may be cut into pieces; without `--tokens`, over the minutes
of this call. The head is written to `--out` after every eighth, so that it can be used at any moment. Without the state
of an earlier call in `--data`, training starts from the head in `--out`, if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cluster.convert import engine_config, fetch_weights
from drafter.learning.network import acceptance_loss
from training.answers import read_lines, target_args, write_answers
from training.batches import ROW_LENGTH, Batch, KeptReadings, Rows, batches, read_rows, read_target
from training.draft_head import TrainableHead, save_head
from training.dspark import TrainableDSparkHead
from training.eagle3 import TrainableEagle3Head
from training.language_model import mixed_precision
from training.peagle import TrainablePEagleHead
from training.schedule import Optimisers, TimeBudget

logger = logging.getLogger("head")

REPOSITORY = Path(__file__).resolve().parent.parent
METHODS: dict[str, type[TrainableHead]] = {
    "eagle3": TrainableEagle3Head, "peagle": TrainablePEagleHead, "dspark": TrainableDSparkHead
}  # fmt: skip
MUON_LR = 0.05
"""With batches of 8 rows: after 40,000 tokens, agreement at the first step was 0.07 with 0.006, 0.23 with 0.02 and 0.26
with 0.05. With 32 rows 0.02 is better."""
NUM_HELD_OUT = 128
"""Rows that measure agreement and are not learned from, of few rows an eighth."""
NUM_SAVES = 8
STATE = "head.pt"
RECORD = "training.json"
"""Beside the head: the coverage of its vocabulary, agreement and acceptance by the number of tokens seen."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=sorted(METHODS), default="eagle3", help="[%(default)s]")
    parser.add_argument("--target", default="smollm2", help="a model as for `secateur serve` [%(default)s]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stage", choices=("answers", "train", "all"), default="all")
    parser.add_argument("--conversations", type=int, default=4000, help="to have answered in all [%(default)s]")
    parser.add_argument("--answer-minutes", type=float, default=float("inf"), help="then start no more")
    parser.add_argument("--max-tokens", type=int, default=192, help="of an answer [%(default)s]")
    parser.add_argument("--engines", type=int, default=1, help="that answer at a time [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=48, help="answers at a time in each [%(default)s]")
    parser.add_argument("--dtype", default="bfloat16", help="of the target while it answers [%(default)s]")
    parser.add_argument("--tokens", type=float, help="of answers to learn from in all [as many as --minutes allow]")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of training in this call")
    parser.add_argument("--batch-rows", type=int, default=8, help="conversations of a training step [%(default)s]")
    parser.add_argument("--draft-vocab", type=int, default=4864, help="of a new head, in tokens [%(default)s]")
    parser.add_argument("--intermediate-size", type=int, help="of a new head's MLP [the target's]")
    parser.add_argument("--muon-lr", type=float, default=MUON_LR, help="[%(default)s]")
    parser.add_argument("--data", type=Path, default=REPOSITORY / "training" / ".data" / "head")
    parser.add_argument("--out", type=Path, help="folder of the head")
    options = parser.parse_args(arguments)
    if options.stage != "answers" and options.out is None:
        parser.error("--out is missing: write the folder of the head")
    if options.stage != "answers" and options.tokens is None and options.minutes == float("inf"):
        parser.error("when to stop is missing: write --tokens, --minutes or both")
    return options


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


class Training:
    """A head that is trained; all that a later call needs is in `STATE`."""

    def __init__(self, options: argparse.Namespace, target: LlamaForCausalLM) -> None:
        self.options, self.target = options, target
        rows = read_rows(read_lines(options.data), target.config.eos_token_id)
        self.rows, self.begins, self.ends = rows, rows.begins_R.tolist(), rows.ends_R.tolist()
        num_held_out = min(NUM_HELD_OUT, len(self.begins) // 8)
        self.held_out, self.chosen = list(range(num_held_out)), list(range(num_held_out, len(self.begins)))
        if not num_held_out or len(self.chosen) < options.batch_rows:
            raise SystemExit(f"{len(self.begins)} answers fit; have {8 + 2 * options.batch_rows} or more answered")
        spans = zip(rows.tokens_RN.tolist(), self.begins, self.ends, strict=True)
        counts = Counter(token for tokens, begin, end in spans for token in tokens[begin:end])
        torch.manual_seed(3)
        self._start(counts)
        self.coverage = sum(counts[token] for token in self.head.draft_ids.tolist()) / counts.total()
        logger.info("train: %d rows, %d answer tokens, coverage %.4f", len(self.chosen), counts.total(), self.coverage)

    def _start(self, counts: Counter[int]) -> None:
        """Start from the state of an earlier call, else the head in `--out`, else a new one.

        counts: how often each token occurs in answers.
        """
        options, state_file = self.options, self.options.data / STATE
        weights_file, state = options.out / "model.safetensors", {}
        self.log: list[dict] = []
        if state_file.exists():
            state = torch.load(state_file, map_location=options.device)
            weights, self.log = state["head"], state["log"]
        elif weights_file.exists():
            weights, self.log = load_file(weights_file), json.loads((options.out / RECORD).read_text())["log"]
        else:
            weights = {}
        if weights:
            draft_ids = weights["d2t"] + torch.arange(len(weights["d2t"]), device=weights["d2t"].device)
            width = next(len(tensor) for name, tensor in weights.items() if name.endswith("mlp.gate_proj.weight"))
        else:
            draft_ids = torch.tensor(sorted(token for token, _ in counts.most_common(options.draft_vocab)))
            width = options.intermediate_size
        self.head = METHODS[options.method].of_target(self.target, draft_ids.to(options.device), width)
        if weights:
            self.head.load_state_dict(self.head.state_dict() | weights)  # an EAGLE-3 head has no mask yet
        self.num_before = state.get("num_before", self.log[-1]["tokens"] if self.log else 0)
        self.num_saves = state.get("num_saves", 0)
        read = partial(read_target, self.target, self.rows, draft_ids=self.head.draft_ids)
        self._read: Callable[[list[int]], Batch] = (
            read if options.device == "cuda" else KeptReadings(self.target, self.rows, self.head.draft_ids)
        )
        self.budget = TimeBudget.from_now(60 * options.minutes)
        self.optimisers = Optimisers(self.head, self.fraction, "head", options.muon_lr)
        if state:
            self.optimisers.load_state_dict(state["optimisers"])

    def fraction(self) -> float:
        """Return how much of the training is done."""
        if self.options.tokens is None:
            return self.budget.fraction()
        return float(self.optimisers.num_tokens / self.options.tokens)

    def loss_of(self, own: list[int], num_depths: int) -> tuple[Tensor, Tensor]:
        """Return `acceptance_loss` of these rows; what is random in it depends on the tokens seen."""
        generator = torch.Generator().manual_seed(self.optimisers.num_tokens)
        batch = self._read(own)
        with mixed_precision(self.head.draft_ids.device):
            drafts = self.head.draft(batch, num_depths, generator)
            return acceptance_loss(drafts, batch.law_AD, batch.favourite_A, self.head.draft_ids)

    def run(self) -> None:
        """Train until all is done, or for `--minutes`."""
        source = itertools.islice(self._batches(), self.optimisers.num_steps, None)
        while True:
            if self.fraction() >= self.num_saves / NUM_SAVES:
                self._write_head()
            if self.fraction() >= 1 or self.budget.fraction() >= 1:
                return self._write_state()
            own = next(source)
            loss, _ = self.loss_of(own, self.head.first_depths if self.fraction() < 0.5 else self.head.num_depths)
            self.optimisers.step(loss, sum(self.ends[row] - self.begins[row] for row in own))

    def _batches(self) -> Iterator[list[int]]:
        return batches(self.begins, list(self.chosen), self.options.batch_rows, random.Random(self.num_before))

    def _write_head(self) -> None:
        """Write the head and what held-out answers say of it, and the state."""
        with torch.no_grad():
            parts = [self.held_out[start : start + 8] for start in range(0, len(self.held_out), 8)]
            seen = torch.stack([self.loss_of(part, self.head.num_depths)[1] for part in parts]).mean(0).tolist()
        agreement, acceptance = ([round(value, 4) for value in values] for values in seen)
        num_tokens = self.num_before + self.optimisers.num_tokens
        entry = {"tokens": num_tokens, "agreement": agreement, "acceptance": acceptance}
        self.log = [*(each for each in self.log if each["tokens"] < num_tokens), entry]
        self.num_saves += 1
        save_head(self.head, self.options.out)
        record = {"coverage": round(self.coverage, 4), "log": self.log}
        (self.options.out / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        self._write_state()
        logger.info("train: %s", entry)

    def _write_state(self) -> None:
        state = {"head": self.head.state_dict(), "optimisers": self.optimisers.state_dict(), "log": self.log}
        state |= {"num_before": self.num_before, "num_saves": self.num_saves}
        file = self.options.data / STATE
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)


def main() -> None:
    """Run the requested stages."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    options = parse_arguments()
    options.data.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    target = None if options.stage == "answers" else load_target(options)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(write_answers, options) if options.stage != "train" else None
        if target is not None and options.device == "cuda":
            compile_layers(target, options)  # while the engines start
        if answered is not None:
            answered.result()
    if target is not None:
        Training(options, target).run()


def compile_layers(target: LlamaForCausalLM, options: argparse.Namespace) -> None:
    """Have the target's layers compiled for batches of any length."""
    for length in (ROW_LENGTH // 2, ROW_LENGTH):
        tokens_RN = torch.zeros(options.batch_rows, length, dtype=torch.int32)
        begins_R = torch.zeros(options.batch_rows, dtype=torch.int64)
        rows = Rows(tokens_RN, begins_R, begins_R + length)
        draft_ids = torch.arange(options.draft_vocab, device=options.device)
        read_target(target, rows, list(range(options.batch_rows)), draft_ids)


if __name__ == "__main__":
    main()
