"""The losses of `training/head.py` against heads that draft token by token, and a training that is cut into pieces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from drafter.learning.network import DEPTH_DISCOUNT, acceptance_loss
from drafter.proposers.block import BlockHead
from drafter.proposers.eagle3 import PEagleHead
from tests.support.plain_block import PlainBlock
from tests.support.plain_peagle import PlainPEagle
from training import answers, evaluate, head
from training.batches import KeptReadings, Rows, feature_layers, read_target
from training.draft_head import save_head
from training.dspark import BLOCK_SIZE, TrainableDSparkHead, sample_anchors
from training.peagle import TrainablePEagleHead
from workers.models.block_format import read_block_spec
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.fusion import load_fusion
from workers.models.readers import read_spec

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "secateur" / "bundled"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


def test_eagle3_learns_the_logarithm_of_what_is_accepted() -> None:
    target = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32).eval().requires_grad_(False)
    trainable = evaluate.load_head(BUNDLED / "eagle3", target)
    tokens = torch.randint(5, 1000, (2, 30), generator=torch.manual_seed(0))
    begins, ends, num_steps = torch.tensor([12, 8]), torch.tensor([24, 30]), 3
    batch = read_target(target, Rows(tokens.int(), begins, ends), [0, 1], trainable.draft_ids)

    drafts = trainable.draft(batch, num_steps, torch.Generator())
    loss, (agreement, acceptance) = acceptance_loss(drafts, batch.law_AD, batch.favourite_A, trainable.draft_ids)

    decoder = evaluate.HeadDecoder(BUNDLED / "eagle3", target.model.embed_tokens.weight)
    view = evaluate.view_target(target, tokens)
    starts = list(range(int(begins.min()) - 1 - num_steps, 30 - 1 - num_steps))
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
    expected = -sum(DEPTH_DISCOUNT**s * float(torch.tensor(values).log().mean()) for s, values in enumerate(accepted))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-3)
    assert acceptance.tolist() == pytest.approx([sum(values) / len(values) for values in accepted], rel=1e-3)
    assert agreement.tolist() == pytest.approx([sum(values) / len(values) for values in agreed])
    assert 0.05 < min(acceptance.tolist()) and max(acceptance.tolist()) < 0.95


def test_answers_that_a_killed_process_left_are_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "answers-0.jsonl"
    file.write_text('{"id": 3, "prompt": [1], "answer": [2]}\n{"id": 4, "pro')
    assert [line["id"] for line in answers.read_lines(tmp_path)] == [3]
    answers.cut_torn_line(file)
    with file.open("a") as out:
        out.write('{"id": 5, "prompt": [1], "answer": []}\n')
    assert [line["id"] for line in answers.read_lines(tmp_path)] == [3, 5]


def test_dspark_learns_the_logarithm_of_what_is_accepted(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """The blocks of all anchors in one pass equal one pass per anchor of the saved head, by the published formulas."""
    draft_ids = torch.tensor([0, 1, 4, 5, 6, 8, 9, 11, 12, 15, 16, 19, 21, 23])
    trainable = TrainableDSparkHead.of_target(target, draft_ids, 32)
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.manual_seed(1)))
            parameter.copy_(parameter.bfloat16())
    save_head(trainable, tmp_path)
    tokens = torch.randint(4, 24, (2, 30), generator=torch.manual_seed(2))
    begins, ends = torch.tensor([12, 8]), torch.tensor([24, 30])
    batch = read_target(target, Rows(tokens.int(), begins, ends), [0, 1], draft_ids)

    drafts = trainable.draft(batch, BLOCK_SIZE, torch.Generator())
    loss, (agreement, acceptance) = acceptance_loss(drafts, batch.law_AD, batch.favourite_A, draft_ids)

    folder = Path(target.config.name_or_path)
    plain = PlainBlock(tmp_path, folder, from_anchor=True)
    output = target(tokens, output_hidden_states=True)
    taps = torch.cat([output.hidden_states[layer] for layer in feature_layers(7)], -1)
    accepted: list[list[float]] = [[] for _ in range(BLOCK_SIZE)]
    agreed: list[list[bool]] = [[] for _ in range(BLOCK_SIZE)]
    for row in range(2):
        own = tokens[row].tolist()
        for anchor in range(int(begins[row]), int(ends[row]) - 1):
            context = plain.fuse(taps[row, :anchor])
            for depth in range(min(BLOCK_SIZE, int(ends[row]) - 1 - anchor)):
                path = own[anchor + 1 : anchor + 1 + depth]
                q_D = plain.logits(own[anchor], context, path).softmax(-1)
                p_V = output.logits[row, anchor + depth].softmax(-1)
                accepted[depth].append(sum(min(float(p_V[t]), float(q)) for t, q in zip(draft_ids, q_D, strict=True)))
                agreed[depth].append(bool(draft_ids[q_D.argmax()] == p_V.argmax()))
    expected = -sum(
        DEPTH_DISCOUNT**depth * float(torch.tensor(values).log().mean()) for depth, values in enumerate(accepted)
    )
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert acceptance.tolist() == pytest.approx([sum(values) / len(values) for values in accepted], rel=1e-4)
    assert agreement.tolist() == pytest.approx([sum(values) / len(values) for values in agreed])

    spec = read_block_spec(tmp_path, read_spec(folder))
    assert (spec.draft_vocab_size, spec.max_depth, spec.tap_layers) == (14, BLOCK_SIZE, feature_layers(7))
    BlockHead.load(spec, tmp_path, folder)
    load_fusion(tmp_path, spec)


def test_peagle_learns_the_logarithm_of_what_is_accepted(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """All anchors in one pass equal one pass per anchor of the saved head, by the published description."""
    draft_ids = torch.tensor([0, 1, 4, 5, 6, 8, 9, 11, 12, 15, 16, 19, 21, 23])
    trainable = TrainablePEagleHead.of_target(target, draft_ids, 32)
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.manual_seed(1)))
            parameter.copy_(parameter.bfloat16())
    save_head(trainable, tmp_path)
    tokens = torch.randint(4, 24, (2, 30), generator=torch.manual_seed(2))
    begins, ends, num_depths = torch.tensor([12, 8]), torch.tensor([24, 30]), trainable.num_depths
    rows = Rows(tokens.int(), begins, ends)
    batch = KeptReadings(target, rows, draft_ids)([0, 1])
    read = read_target(target, rows, [0, 1], draft_ids)
    assert torch.equal(batch.index_BN[batch.is_answer_BN], read.index_BN[read.is_answer_BN])
    torch.testing.assert_close(batch.law_AD, read.law_AD, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(batch.features_BNF[0, :24], read.features_BNF[0, :24], atol=4e-3, rtol=4e-3)

    drafts = trainable.draft(batch, num_depths, torch.Generator())
    loss, (agreement, acceptance) = acceptance_loss(drafts, batch.law_AD, batch.favourite_A, draft_ids)

    plain = PlainPEagle(tmp_path, Path(target.config.name_or_path))
    output = target(tokens, output_hidden_states=True)
    taps = torch.cat([output.hidden_states[layer] for layer in feature_layers(7)], -1)
    accepted: list[list[float]] = [[] for _ in range(num_depths)]
    agreed: list[list[bool]] = [[] for _ in range(num_depths)]
    for row in range(2):
        own = tokens[row].tolist()
        for anchor in range(int(begins[row]) - 1, int(ends[row]) - 1):
            logits = plain.logits(own[: anchor + 1], taps[row, :anchor], num_depths)
            first = anchor == int(begins[row]) - 1  # the answer's first token is drafted at the first depth alone
            for depth in range(1 if first else min(num_depths, int(ends[row]) - 1 - anchor)):
                q_D, p_V = logits[depth].softmax(-1), output.logits[row, anchor + depth].softmax(-1)
                accepted[depth].append(sum(min(float(p_V[t]), float(q)) for t, q in zip(draft_ids, q_D, strict=True)))
                agreed[depth].append(bool(draft_ids[q_D.argmax()] == p_V.argmax()))
    expected = -sum(
        DEPTH_DISCOUNT**depth * float(torch.tensor(values).log().mean()) for depth, values in enumerate(accepted)
    )
    assert float(loss.detach()) == pytest.approx(expected, rel=5e-3)
    assert acceptance.tolist() == pytest.approx([sum(values) / len(values) for values in accepted], rel=5e-3)
    assert agreement.tolist() == pytest.approx([sum(values) / len(values) for values in agreed])

    spec = read_eagle3_spec(tmp_path, read_spec(Path(target.config.name_or_path)))
    assert (spec.draft_vocab_size, spec.max_depth, spec.tap_layers) == (14, num_depths, feature_layers(7))
    PEagleHead.load(spec, tmp_path, target.config.name_or_path)


def test_anchors_are_tokens_of_answers_that_are_followed_by_another() -> None:
    is_answer = torch.zeros(3, 200, dtype=torch.bool)  # whether the NEXT token is one of the answer
    is_answer[0, 9:190], is_answer[1, 20:24], is_answer[2, 3:4] = True, True, True
    anchors, is_drawn = sample_anchors(is_answer, torch.manual_seed(0))
    drawn = [set(own[is_own].tolist()) for own, is_own in zip(anchors, is_drawn, strict=True)]
    assert len(drawn[0]) == 96 and drawn[0] <= set(range(10, 190))
    assert drawn[1:] == [{21, 22, 23}, set()]
    assert set(sample_anchors(is_answer, torch.manual_seed(1))[0][0].tolist()) != drawn[0]


class Steps:
    """A budget of a number of steps."""

    def __init__(self, count: int) -> None:
        self.count = count

    def fraction(self) -> float:
        self.count -= 1
        return float(self.count < 0)


@pytest.mark.parametrize("method", ["dspark", "eagle3", "peagle"])
def test_a_training_in_pieces_equals_one_without_a_stop(
    tmp_path: Path, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    generator = torch.manual_seed(5)
    lines = []
    for number in range(24):
        prompt = torch.randint(4, 24, (6 + number % 3,), generator=generator)
        answer = target.generate(prompt[None], max_new_tokens=14, do_sample=False)[0, len(prompt) :]
        lines.append(json.dumps({"id": number, "prompt": prompt.tolist(), "answer": answer.tolist()}) + "\n")

    def train(name: str, pieces: list[int]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "answers-0.jsonl").write_text("".join(lines))
        words = ["--method", method, "--tokens", "1500", "--batch-rows", "4", "--draft-vocab", "12"]
        for steps in pieces:
            monkeypatch.setattr(head.TimeBudget, "from_now", lambda _, steps=steps: Steps(steps))
            options = head.parse_arguments([*words, "--data", str(folder), "--out", str(folder / "out")])
            head.Training(options, target).run()
        return folder

    whole, cut = train("whole", [100]), train("cut", [3, 1, 9, 100])
    for name in ("model.safetensors", "config.json", "training.json"):
        assert (whole / "out" / name).read_bytes() == (cut / "out" / name).read_bytes()
    log = json.loads((whole / "out" / "training.json").read_text())["log"]
    assert len(log) == 9 and log[-1]["tokens"] >= 1500
    assert sum(log[-1]["acceptance"]) > 1.1 * sum(log[0]["acceptance"])


def test_without_a_number_of_tokens_the_schedule_follows_the_minutes(
    tmp_path: Path, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"id": number, "prompt": [5, 6, 7 + number % 12], "answer": list(range(8, 20))} for number in range(24)]
    (tmp_path / "answers-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    passed = itertools.count()
    budget = SimpleNamespace(fraction=lambda: next(passed) / 60)
    monkeypatch.setattr(head.TimeBudget, "from_now", lambda _: budget)
    words = ["--method", "dspark", "--minutes", "1", "--batch-rows", "4", "--draft-vocab", "12"]
    training = head.Training(
        head.parse_arguments([*words, "--data", str(tmp_path), "--out", str(tmp_path / "out")]), target
    )
    training.run()
    lr = training.optimisers.optimisers[0].param_groups[0]["lr"]
    assert 0 < lr < 0.1 * head.MUON_LR and next(passed) < 64
    log = json.loads((tmp_path / "out" / "training.json").read_text())["log"]
    assert len(log) == 9 and log[-1]["tokens"] == training.optimisers.num_tokens
