"""The training loss of `training/head.py` against a head that drafts token by token with a KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from training import evaluate, head

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "secateur" / "bundled"


def test_loss_is_the_logarithm_of_what_is_accepted() -> None:
    target = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32).eval().requires_grad_(False)
    trainable = evaluate.load_head(BUNDLED / "eagle3", target)
    tokens = torch.randint(5, 1000, (2, 30), generator=torch.manual_seed(0))
    begins, ends, num_steps = torch.tensor([12, 8]), torch.tensor([24, 30]), 3
    batch = head.read_target(target, head.Rows(tokens.int(), begins, ends), [0, 1], trainable.draft_ids)
    first = int(begins.min()) - 1 - num_steps

    loss, (agreement, acceptance) = head.unrolled_loss(trainable, batch, first, num_steps)

    decoder = evaluate.HeadDecoder(BUNDLED / "eagle3", target.model.embed_tokens.weight)
    view = evaluate.view_target(target, tokens)
    starts = list(range(first, 30 - 1 - num_steps))
    accepted: list[list[float]] = [[] for _ in range(num_steps)]
    agreed: list[list[bool]] = [[] for _ in range(num_steps)]
    for row in range(2):
        drafted = decoder.draft_along(tokens[row].tolist(), view.features_BTF[row], starts, num_steps).softmax(-1)
        law = view.logits_BTV[row].softmax(-1)
        for start, q_SV in zip(starts, drafted, strict=True):
            for s in range(num_steps):
                if begins[row] <= start + 2 + s < ends[row]:
                    p_V = law[start + 1 + s]
                    accepted[s].append(float(torch.minimum(p_V, q_SV[s]).sum()))
                    agreed[s].append(bool(p_V.argmax() == q_SV[s].argmax()))
    expected = -sum(
        head.STEP_DISCOUNT**s * float(torch.tensor(values).log().mean()) for s, values in enumerate(accepted)
    )
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-3)
    assert acceptance.tolist() == pytest.approx([sum(values) / len(values) for values in accepted], rel=1e-3)
    assert agreement.tolist() == pytest.approx([sum(values) / len(values) for values in agreed])
    assert 0.05 < min(acceptance.tolist()) and max(acceptance.tolist()) < 0.95


def test_answers_that_a_killed_process_left_are_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "answers-0.jsonl"
    file.write_text('{"id": 3, "prompt": [1], "answer": [2]}\n{"id": 4, "pro')
    assert [line["id"] for line in head.read_lines(tmp_path)] == [3]
    head.cut_torn_line(file)
    with file.open("a") as out:
        out.write('{"id": 5, "prompt": [1], "answer": []}\n')
    assert [line["id"] for line in head.read_lines(tmp_path)] == [3, 5]
