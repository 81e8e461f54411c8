"""Writes log-likelihoods by transformers in float32: the sums that a client's answers are compared with.

    python tests/clients/reference.py MODEL < rows.json

A row is `[context, continuation]`, two lists of token ids. The answer is a list of `[sum of the continuation's log
probabilities, whether each of its tokens is the likeliest one]`.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@torch.inference_mode()
def log_likelihood(model: PreTrainedModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the log-likelihood of a continuation, and whether it is the greedy one."""
    logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].float()
    chosen = torch.tensor(continuation)
    scores = logits.log_softmax(-1).gather(1, chosen[:, None])
    return float(scores.sum()), bool((logits.argmax(-1) == chosen).all())


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    json.dump([log_likelihood(model, *row) for row in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
