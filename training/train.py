"""Make the bundled models: corpus, target, EAGLE-3 head, draft, model card.

    python -m training.train --minutes 120                  # everything
    python -m training.train --stage card                   # one stage: evaluates the models, writes MODEL_CARD.md

`--minutes` is wall-clock time for the three models, divided by `SHARES`.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # before the slow imports and the corpus, which count towards the budget

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import platform  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from training.data import Corpus, load_corpus  # noqa: E402
from training.draft_head import save_head  # noqa: E402
from training.eagle3 import TrainableEagle3Head, train_head  # noqa: E402
from training.language_model import (  # noqa: E402
    CPU_SHAPES,
    CUDA_SHAPES,
    TINY_SHAPES,
    Shapes,
    load_model,
    save_model,
    train_draft,
    train_target,
    write_own_text,
)
from training.schedule import TimeBudget  # noqa: E402

logger = logging.getLogger("train")

REPOSITORY = Path(__file__).resolve().parent.parent
STAGES = ("target", "eagle3", "draft")
SHARES = {"target": 0.55, "eagle3": 0.29, "draft": 0.16}
OWN_TEXT_SHARE = 0.2
"""Largest share of a stage's time in which the target generates training text."""
RESERVED_SECONDS = 15.0
"""Reserved for loading and saving."""


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("corpus", *STAGES, "card", "all"), default="all")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data", type=Path, default=REPOSITORY / "training" / ".data")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "secateur" / "bundled")
    parser.add_argument("--tiny", action="store_true", help="batches of a few hundred tokens, to try the script out")
    return parser.parse_args()


class Trainer:
    """Runs the training stages of one call; each loads the results of earlier stages from disk."""

    def __init__(self, data: Path, out: Path, shapes: Shapes, device: torch.device):
        self.data, self.out, self.shapes, self.device = data, out, shapes, device
        self.corpus: Corpus = load_corpus(data, device)
        self.own_text: torch.Tensor | None = None

    def run(self, stages: tuple[str, ...], seconds: float) -> None:
        """Run `stages` in order within `seconds` of `STARTED`; later stages may use the time that one leaves."""
        total = TimeBudget(start=STARTED, seconds=seconds - min(RESERVED_SECONDS, seconds / 4))
        for i, stage in enumerate(stages):
            share = SHARES[stage] / sum(SHARES[later] for later in stages[i:])
            budget = TimeBudget.from_now(total.remaining() * share)
            record = getattr(self, f"make_{stage}")(budget)
            self._record(stage, record | {"seconds": round(time.monotonic() - budget.start)})

    def make_target(self, budget: TimeBudget) -> dict:
        """Train and save the target."""
        trained = train_target(self.corpus, self.shapes, budget, self.device)
        save_model(trained.model, self.data / "tokenizer", self.out / "target")
        return trained.record()

    def make_eagle3(self, budget: TimeBudget) -> dict:
        """Train and save the EAGLE-3 head."""
        target = load_model(self.out / "target", self.device)
        trained = train_head(target, self.corpus, self._own_text(target, budget), self.shapes, budget)
        assert isinstance(trained.model, TrainableEagle3Head)
        save_head(trained.model, self.out / "eagle3")
        return trained.record()

    def make_draft(self, budget: TimeBudget) -> dict:
        """Train and save the draft model."""
        target = load_model(self.out / "target", self.device)
        own_text = self._own_text(target, budget)
        trained = train_draft(target, self.corpus, own_text, self.shapes, budget, self.device)
        save_model(trained.model, self.data / "tokenizer", self.out / "draft")
        return trained.record()

    def _own_text(self, target: LlamaForCausalLM, budget: TimeBudget) -> torch.Tensor:
        """Return text that the target wrote, generated once per call."""
        if self.own_text is None:
            share = TimeBudget.from_now(budget.remaining() * OWN_TEXT_SHARE)
            self.own_text = write_own_text(target, self.corpus, self.shapes, share)
            logger.info("the target wrote %d texts of %d tokens", *self.own_text.shape)
        return self.own_text

    def _record(self, stage: str, record: dict) -> None:
        """Merge a stage's record into metrics.json."""
        logger.info("%s: %s", stage, record)
        file = self.out / "metrics.json"
        metrics = json.loads(file.read_text()) if file.exists() else {}
        metrics["corpus"] = json.loads((self.data / "corpus.json").read_text())
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else platform.machine() + " CPU"
        record |= {"device": device, "torch": torch.__version__}
        metrics["training"] = metrics.get("training", {}) | {stage: record}
        file.write_text(json.dumps(metrics, indent=2) + "\n")


def main() -> None:
    """Run the requested stages."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    arguments = parse_arguments()
    stage = arguments.stage
    if stage == "corpus" or (stage == "all" and not (arguments.data / "corpus.json").exists()):
        from training.corpus import build_corpus

        arguments.data.mkdir(parents=True, exist_ok=True)
        build_corpus(arguments.data, REPOSITORY / "secateur" / "bundled" / "prompts.jsonl")
    if stage in ("all", *STAGES):
        torch.set_float32_matmul_precision("high")
        shapes = CUDA_SHAPES if arguments.device == "cuda" else CPU_SHAPES
        shapes = TINY_SHAPES if arguments.tiny else shapes
        trainer = Trainer(arguments.data, arguments.out, shapes, torch.device(arguments.device))
        trainer.run(STAGES if stage == "all" else (stage,), seconds=60 * arguments.minutes)
    if stage in ("all", "card"):
        from training.card import write_card

        write_card(arguments.data, arguments.out)


if __name__ == "__main__":
    main()
