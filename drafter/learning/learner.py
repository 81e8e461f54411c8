"""Trains a copy of the serving draft head on what was just verified, in slices between two messages.

    learner.saw(message)      keep its rows
    learner.work()            one slice: a window's gradient, one parameter's update, or one window of the canary
    learner.offer()           the folder of a head that is better by the canary; the engine swaps it in
    learner.rebase(folder)    go on from the head that drafts now

The canary scores both heads on windows that neither has learnt from. A window's score is the number of tokens that a
chain drafted from each of its positions is expected to gain; of a token that was emitted, the head's probability of it
at the request's temperature counts. The differences of some windows are a sample, and their mean with its standard
error decides: better by three of them is offered, worse by three is dropped, anything else learns on. Each canary has
windows of its own, so that trying often does not find luck. A better head is offered only if no tenant loses by it: on
none's windows that are held out from learning is it worse by more than the standard error.
Legend: N rows of a window, A drafted tokens, D draft vocabulary, H width.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafter.learning.network import Drafted, LayerSizes, MidLayer, RMSNorm, acceptance_loss
from drafter.learning.reservoir import Reservoir, Window
from workers.models.specs import Eagle3Spec, ModelSpec
from workers.types import DraftRequest

logger = logging.getLogger(__name__)

NUM_STEPS = 3
"""Unrolled steps of the training-time test, and depths that the canary scores."""
LEARNING_RATE = 3e-4
BATCH_WINDOWS = 8
FEWEST_WINDOWS = 16
"""To learn from, before learning begins."""
CANARY_WINDOWS = 24
SURE = 3.0
"""Standard errors by which a head must be better, or worse: of a thousand equal ones, one is taken."""
FEWEST_HELD = 4
"""Windows of a tenant that are held out, before they can refuse a head."""
KEPT_HEADS = 3
"""Learnt heads that stay on disk; `rollback` needs the last but one."""
QUIET_S = 0.05
"""Without a message for so long, no request runs, and a slice may take what it takes."""
WEIGHTS, CONFIG, RECORD = "model.safetensors", "config.json", "training.json"
OTHER_TENSORS = {"fc.weight", "d2t", "t2d", "embed_tokens.weight"}


def _sizes(layers: ModelSpec) -> LayerSizes:
    sizes = SimpleNamespace(
        hidden_size=layers.hidden_size,
        intermediate_size=layers.intermediate_size,
        num_attention_heads=layers.num_heads,
        num_key_value_heads=layers.num_kv_heads,
        head_dim=layers.head_dim,
        rms_norm_eps=layers.rms_norm_eps,
    )
    return cast(LayerSizes, sizes)


class Network(nn.Module):
    """The part of an EAGLE-3 head that learns, named as in the checkpoint. The fusion `fc` is the verifier's."""

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        layers = spec.layers
        self.midlayer = MidLayer(_sizes(layers), torch.tensor(layers.rope.inv_freq))
        self.norm = RMSNorm(layers.hidden_size, layers.rms_norm_eps)
        self.lm_head = nn.Linear(layers.hidden_size, spec.draft_vocab_size, bias=False)

    def draft(self, embeds_NH: Tensor, window: Window) -> Iterator[tuple[Tensor, range]]:
        """Yield each step's logits [A, D], and the rows whose tokens they draft. Context alone is not drafted from."""
        num_starts = len(window.token_N) - NUM_STEPS
        first = min(max(window.begin - 1, 0), num_starts - 1)
        embeds_1NH = F.pad(embeds_NH[None], (0, 0, 1, 0))
        features_1TH = window.features_NH[None, :num_starts].float()
        for step, hidden in enumerate(self.midlayer.unroll(embeds_1NH, features_1TH, NUM_STEPS, first)):
            yield self.lm_head(self.norm(hidden[0])), range(first + step + 1, num_starts + step + 1)


def why_not_learnable(spec: object, folder: Path, *, device: str, ranks: int) -> str | None:
    """Return why a head can neither learn nor be scored while it serves; None if it can."""
    if not isinstance(spec, Eagle3Spec) or spec.mask_token_id is not None:
        return "is for EAGLE-3 heads that draft one token a pass; use one, or leave it out"
    if device != "cpu":
        return "is implemented on CPUs; leave it out"
    if ranks > 1:
        return "works on one drafter rank; write draft_tensor_parallel_size 1"
    has_plain_rope = spec.layers.rope.scaling == 1.0 and 2 * len(spec.layers.rope.inv_freq) == spec.layers.head_dim
    if spec.norm_before_residual or spec.norm_output or spec.layers.windows != (None,) or not has_plain_rope:
        return "works with heads of one plain EAGLE-3 layer; leave it out"
    try:
        trained_tensors(spec, load_file(folder / WEIGHTS))
    except (ValueError, OSError) as error:
        return f"works with heads in SafeAILab's layout, with an lm_head of their own; leave it out ({error})"
    return None


def trained_tensors(spec: Eagle3Spec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that learn, in float32. Raises ValueError if some are missing, or there are others."""
    with torch.device("meta"):
        names = Network(spec).state_dict().keys()
    if wrong := sorted((names - tensors.keys()) | (tensors.keys() - names - OTHER_TENSORS)):
        raise ValueError(f"missing or unknown: {', '.join(wrong)}")
    return {name: tensors[name].float() for name in names}


def index_of(target_ids: Tensor, vocab_size: int) -> Tensor:
    """Return the place of each target token in the draft vocabulary, int64 [V]; -1 = it has none."""
    return torch.full((vocab_size,), -1).index_put((target_ids,), torch.arange(len(target_ids)))


@torch.no_grad()
def reached(head: Network, embed: Callable[[Tensor], Tensor], index_V: Tensor, window: Window) -> Tensor:
    """Return for each depth the probability that a chain from a position of the window is accepted up to it [steps].

    Their sum is the number of tokens that a chain is expected to gain. index_V: see `index_of`.
    """
    index_N, temperature = index_V[window.token_N], max(window.temperature, 1e-3)
    reached_A, means = torch.tensor(1.0), []
    for logits_AD, rows in head.draft(embed(window.token_N).float(), window):
        index_A = index_N[rows.start : rows.stop]
        q_A = (logits_AD / temperature).softmax(-1).gather(1, index_A.clamp(min=0)[:, None])[:, 0]
        reached_A = reached_A * q_A.nan_to_num() * (index_A >= 0)  # what a broken head computes is never accepted
        means.append(reached_A.mean())
    return torch.stack(means)


class Slices(ABC):
    """Work on what was verified, in slices between two messages."""

    _slices: Iterator[None]

    def __init__(self, reservoir: Reservoir) -> None:
        self.reservoir = reservoir
        self._gaps_s: deque[float] = deque(maxlen=32)  # from a reply to the next message
        self._slices_s: deque[float] = deque(maxlen=32)
        self._replied_s = time.monotonic()

    def began(self) -> None:
        """Note that a message has come."""
        self._gaps_s.append(time.monotonic() - self._replied_s)

    def saw(self, message: DraftRequest) -> None:
        """Note that a message was replied to."""
        self._replied_s = time.monotonic()

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Return whether there is a slice to run."""

    @property
    def wait_s(self) -> float:
        """Return how long to wait for a message before the next slice: not at all if one probably fits before it."""
        idle_s = time.monotonic() - self._replied_s
        fits = idle_s + max(self._slices_s, default=0.0) < min(self._gaps_s, default=0.0)
        return 0.0 if fits or idle_s >= QUIET_S else QUIET_S - idle_s

    def work(self) -> None:
        """Run one slice."""
        began = time.monotonic()
        with torch.inference_mode(mode=False), torch.enable_grad():
            next(self._slices)
        self._slices_s.append(time.monotonic() - began)


class Learner(Slices):
    """One drafter's. embed: the embeddings [N, H] of target tokens; target_ids: those of the draft vocabulary [D].

    heads: the folder of the learnt heads. folder: that of the serving head. Raises ValueError, OSError as
    `why_not_learnable` says.
    """

    def __init__(
        self, spec: Eagle3Spec, folder: str, heads: str, embed: Callable[[Tensor], Tensor], target_ids: Tensor
    ) -> None:
        self._spec, self._heads, self._embed, self._target_ids = spec, Path(heads), embed, target_ids
        super().__init__(Reservoir(CANARY_WINDOWS))
        self._index_V = index_of(target_ids, spec.layers.vocab_size)
        self._serving, self._candidate = Network(spec).requires_grad_(False), Network(spec)
        self._thread = ThreadPoolExecutor(1, "learner")
        self._saving: Future[str] | None = None
        self._offered_s = -math.inf  # when a head was offered whose swap has not ended
        self.rebase(folder)

    def rebase(self, folder: str) -> None:
        """Go on from the head of this folder, which drafts now. Raises ValueError, OSError."""
        self._folder, self._offered_s, self._saving = Path(folder), -math.inf, None
        tensors = trained_tensors(self._spec, load_file(self._folder / WEIGHTS))
        is_own = all(torch.equal(tensors[name], value) for name, value in self._candidate.state_dict().items())
        self._serving.load_state_dict(tensors)
        if not is_own:  # of another fusion, perhaps, whose features mean something else
            self._drop()
            self.reservoir = Reservoir(CANARY_WINDOWS)
        self._slices = self._learn()

    def _drop(self) -> None:
        """Let the candidate be the serving head again."""
        self._candidate.load_state_dict(self._serving.state_dict())
        self._candidate.zero_grad(set_to_none=True)
        parameters = self._candidate.parameters()
        self._optimisers = [torch.optim.AdamW([own], lr=LEARNING_RATE, weight_decay=0.0) for own in parameters]

    # ---- what the drafter calls

    def saw(self, message: DraftRequest) -> None:
        """Keep the rows of a message that was replied to."""
        super().saw(message)
        self.reservoir.add(message)

    @property
    def has_work(self) -> bool:
        """Return whether there is enough to learn from."""
        waits_for_swap = time.monotonic() - self._offered_s < 60.0
        return len(self.reservoir.learnt) >= FEWEST_WINDOWS and self._saving is None and not waits_for_swap

    def offer(self) -> str | None:
        """Return the folder of a better head, once."""
        if self._saving is None or not self._saving.done():
            return None
        saved, self._saving = self._saving, None
        if error := saved.exception():
            logger.error("a learnt head could not be written to %s: %s", self._heads, error)
            return None
        self._offered_s = time.monotonic()
        return saved.result()

    # ---- slices

    def _learn(self) -> Iterator[None]:
        while True:
            for _ in range(BATCH_WINDOWS):
                self._loss(self.reservoir.sample()).backward()
                yield
            for optimiser in self._optimisers:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
                yield
            if len(self.reservoir.fresh) >= CANARY_WINDOWS:
                yield from self._judge()

    def _loss(self, window: Window) -> Tensor:
        index_N = self._index_V[window.token_N]
        law_ND = F.one_hot(index_N.clamp(min=0), len(self._target_ids)).float() * (index_N >= 0)[:, None]
        drafts = self._candidate.draft(self._embed(window.token_N).float(), window)
        rows = (Drafted(logits, torch.arange(own.start, own.stop)) for logits, own in drafts)
        return acceptance_loss(rows, law_ND, window.token_N, self._target_ids)[0] / BATCH_WINDOWS

    def _judge(self) -> Iterator[None]:
        """Compare both heads on windows that neither has learnt from, and act on it."""
        windows, self.reservoir.fresh = self.reservoir.fresh, []
        scores = yield from self._compare(windows)
        for window in windows:
            self.reservoir.learn(window)
        mean, error = gain(scores)
        old = statistics.fmean(serving for serving, _ in scores)
        told = f"{old + mean:.3f} instead of {old:.3f} tokens a chain ({mean:+.3f}, standard error {error:.3f})"
        if mean > SURE * error and (yield from self._harms()):
            logger.info("the learnt head is better, but not for all tenants, and learns on: %s", told)
        elif mean > SURE * error:
            logger.info("the learnt head is better: %s", told)
            state = {name: value.clone() for name, value in self._candidate.state_dict().items()}
            entry = {"tokens": self.reservoir.num_rows, "serving": old, "gain": mean, "standard_error": error}
            self._saving = self._thread.submit(partial(write_head, self._heads, self._folder, state, entry))
        elif mean < -SURE * error:
            logger.info("the learnt head is worse and is dropped: %s", told)
            self._drop()
        else:
            logger.info("the learnt head learns on: %s", told)
        yield

    def _harms(self) -> Generator[None, None, bool]:
        """Return whether the candidate drafts worse for a tenant."""
        for held in list(self.reservoir.held.values()):
            if len(held) >= FEWEST_HELD:
                mean, error = gain((yield from self._compare(held)))
                if mean < -error:
                    return True
        return False

    def _compare(self, windows: list[Window]) -> Generator[None, None, list[tuple[float, float]]]:
        """Return the scores of both heads on each window."""
        scores = []
        for window in windows:
            scores.append((self._score(self._serving, window), self._score(self._candidate, window)))
            yield
        return scores

    def _score(self, head: Network, window: Window) -> float:
        """Return the expected tokens of a chain from a position of the window."""
        return float(reached(head, self._embed, self._index_V, window).sum())


def gain(scores: list[tuple[float, float]]) -> tuple[float, float]:
    """Return by how much the second of each pair is larger on average, and the standard error of that."""
    return spread([new - old for old, new in scores])


def spread(values: list[float]) -> tuple[float, float]:
    """Return the mean of some values, and its standard error."""
    return statistics.fmean(values), max(statistics.stdev(values) / math.sqrt(len(values)), 1e-9)


def write_head(heads: Path, base: Path, state: dict[str, Tensor], entry: dict[str, Any]) -> str:
    """Write a head to a new folder below `heads`: that of `base` with other weights; return it.

    Its `training.json` says what the canary measured. Older folders but the last are removed.
    """
    heads.mkdir(parents=True, exist_ok=True)
    numbers = [int(folder.name) for folder in learnt_heads(heads)]
    folder = heads / f"{max(numbers, default=0) + 1:06d}"
    making = heads / f".{folder.name}"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    tensors = load_file(base / WEIGHTS) | {name: value.contiguous() for name, value in state.items()}
    save_file(tensors, making / WEIGHTS, metadata={"format": "pt"})
    shutil.copy(base / CONFIG, making / CONFIG)
    record: dict[str, Any] = json.loads((base / RECORD).read_text()) if (base / RECORD).exists() else {}
    record["learnt"] = [*record.get("learnt", []), entry | {"from": str(base)}]
    (making / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    (making / "README.md").write_text(
        "# A draft head that learnt while it served\n\n"
        f"`secateur serve` wrote it: the head of `{base}` with a decoder layer and an output layer trained on\n"
        "what the target answered. `learnt` in `training.json` lists each time it was taken: the tokens seen, the\n"
        "expected tokens of a chain of the head before, and the gain with its standard error.\n"
    )
    making.rename(folder)
    for old in learnt_heads(heads)[:-KEPT_HEADS]:
        shutil.rmtree(old, ignore_errors=True)
    return str(folder)


def learnt_heads(heads: Path) -> list[Path]:
    """Return the folders of learnt heads, the newest last."""
    return sorted(own for own in heads.glob("[0-9]" * 6) if (own / WEIGHTS).exists())
