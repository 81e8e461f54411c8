"""A drafter keeps what it may learn from, and takes what it learnt when that is better."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.learning import learner as learning
from drafter.learning.learner import Learner, gain, learnt_heads, why_not_learnable, write_head
from drafter.learning.reservoir import CONTEXT, FEWEST, MAX_HELD, WINDOW, Reservoir, Window
from drafter.proposers.eagle3 import Eagle3Head
from tests.support.engines import BUNDLED
from workers.config import TreeRules
from workers.models.specs import Eagle3Spec
from workers.settings import SamplingSettings
from workers.types import AttentionMetadata, DraftRequest, LearnRows, SamplingBatch

WIDTH = 192
FOLDER = BUNDLED / "eagle3"


def message(rows: dict[int, tuple[int, list[int]]], *, num_prompt: int = 0, temperature: float = 0.0) -> DraftRequest:
    """Return a message with these rows, {request: (first slot, tokens)}. A row's feature is its slot, everywhere."""
    sizes = [len(tokens) for _, tokens in rows.values()]
    count = len(rows)
    slots = [slot + i for slot, tokens in rows.values() for i in range(len(tokens))]
    zero_B = torch.zeros(count, dtype=torch.int32)
    return DraftRequest(
        offsets=torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32),
        start_B=torch.tensor([slot for slot, _ in rows.values()], dtype=torch.int32),
        token_M=torch.tensor([token for _, tokens in rows.values() for token in tokens], dtype=torch.int32),
        page_table_BP=zero_B[:, None],
        rule_B=zero_B,
        auto_B=zero_B,
        num_nodes_B=zero_B,
        max_depth_B=zero_B,
        rules=TreeRules().each(lambda value: torch.tensor([value] * count)),
        constraints_U=torch.zeros(0, dtype=torch.uint8),
        sampling=SamplingBatch.stack([SamplingSettings(temperature=temperature)] * count),
        costs=None,
        features_MH=torch.tensor(slots, dtype=torch.float32)[:, None].expand(-1, WIDTH).contiguous(),
        learn=LearnRows(
            id_B=torch.tensor(list(rows), dtype=torch.int32), num_prompt_B=zero_B + num_prompt, tenant_B=zero_B
        ),
    )


def windows(kept: Reservoir) -> list[Window]:
    every = chain(kept.learnt, kept.fresh, *kept.held.values())
    return sorted(every, key=lambda window: float(window.features_NH[0, 0]))


def test_windows_are_consecutive_rows_whose_targets_are_the_target_s_own() -> None:
    kept, text = Reservoir(8), list(range(1000, 1200))
    for start in range(1, 150, 3):
        kept.add(message({7: (start, text[start : start + 3]), 8: (start, [5, 5, 5])}, num_prompt=40))
    own = [window for window in windows(kept) if window.token_N[0] != 5]
    assert len(own) >= 2
    for window in own:
        slots = window.features_NH[:, 0].long()
        assert torch.equal(slots, torch.arange(len(slots)) + slots[0]) and torch.equal(window.token_N, slots + 1000)
        assert len(slots) >= WINDOW and slots[window.begin] >= 40
    assert own[0].features_NH[0, 0] == 40 - CONTEXT and own[0].begin == CONTEXT
    assert own[1].features_NH[own[1].begin, 0] == own[0].features_NH[-1, 0] + 1, "no token is learnt twice"


def test_a_request_that_opted_out_leaves_nothing() -> None:
    kept = Reservoir(8)
    for start in range(1, 400, 10):
        kept.add(message({0: (start, [9] * 10)}))
    assert not windows(kept) and kept.num_rows == 0 and not kept._open


def test_a_short_answer_is_kept_when_it_has_ended_and_a_preempted_one_begins_anew() -> None:
    kept = Reservoir(8)
    kept.add(message({3: (1, [4] * (FEWEST + 2))}))
    kept.add(message({4: (1, [6] * 5)}))
    kept.add(message({4: (1, [6] * 20)}))  # the same rows again
    for _ in range(200):
        kept.add(message({5: (1, [1])}))
    assert [len(window.token_N) for window in windows(kept)] == [FEWEST + 2, 20]


def test_memory_and_age_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.learning.reservoir.MAX_BYTES", 5 * WINDOW * (4 * WIDTH + 8))
    kept = Reservoir(4)
    for id in range(1, 100):
        kept.add(message({id: (1, [id] * WINDOW)}))
    assert len(kept.learnt) == 5 and len(kept.fresh) == 4
    monkeypatch.setattr("drafter.learning.reservoir.MAX_AGE_S", 0.0)
    for _ in range(64):
        kept.add(message({0: (1, [1])}))
    assert not windows(kept)


def test_a_few_windows_of_each_tenant_are_held_out_however_little_it_sends() -> None:
    kept = Reservoir(8)
    for id in range(1, 400):
        made = message({id: (1, [id] * WINDOW if id % 4 else [7] * WINDOW)})
        assert made.learn is not None
        made.learn.tenant_B.fill_(5 if id % 20 == 1 else 6)
        kept.add(made)
    assert len(kept.held[6]) == MAX_HELD and 3 <= len(kept.held[5]) <= MAX_HELD
    for held in kept.held.values():
        assert len({int(window.token_N[0]) for window in held}) == len(held), "repeats say nothing more"
        assert not any(own is other for own in held for other in [*kept.learnt, *kept.fresh])
    taught = Counter(kept.sample().tenant for _ in range(400))
    assert sum(window.tenant == 5 for window in kept.learnt) < 30 and taught[5] > 150


def test_the_network_drafts_what_the_serving_head_drafts(spec: Eagle3Spec, serving: Eagle3Head, tmp_path: Path) -> None:
    """At the first depth behind a whole prefix."""
    generator = torch.Generator().manual_seed(1)
    count = 20
    token_N = torch.randint(0, 2048, (count,), generator=generator)
    features_NH = torch.randn(count, WIDTH, generator=generator)
    slot_N = np.arange(1, count + 1, dtype=np.int32)
    attention = AttentionMetadata(
        query_offsets=np.array([0, count], dtype=np.int32),
        page_table_BP=np.array([[1, 2]], dtype=np.int32),
        base_B=np.zeros(1, dtype=np.int32),
        slot_N=slot_N,
        visible_N=slot_N + 1,
        ancestors_N=np.zeros(count, dtype=np.int64),
    )
    plan, kv = serving.plan(attention, 16), serving.new_kv_pool(48)
    expected = serving.logits(serving.forward(token_N, features_NH, torch.from_numpy(slot_N - 1), plan, kv))
    own = learner(spec, serving, tmp_path)
    window = Window(token_N, features_NH, 1, 0.0, 0.0)
    drafted, rows = next(own._candidate.draft(serving.embed(token_N), window))
    assert rows == range(1, count - learning.NUM_STEPS + 1)
    torch.testing.assert_close(drafted.detach(), expected[: len(drafted)], atol=1e-4, rtol=1e-4)


def fill(own: Learner, text: Callable[[int], list[int]], num: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for id in range(1, 1 + num):
        made = message({id: (1, text(id))})
        noise = torch.randn(made.features_MH.shape, generator=generator)  # type: ignore[union-attr]
        own.saw(DraftRequest(**{f: getattr(made, f) for f in made.__dataclass_fields__} | {"features_MH": noise}))


def learner(spec: Eagle3Spec, serving: Eagle3Head, heads: Path) -> Learner:
    ids = serving.vocab.target_ids
    assert ids is not None
    return Learner(spec, str(FOLDER), str(heads), serving.embed, ids.clone())


def run(own: Learner, rounds: int = 400) -> str | None:
    for _ in range(rounds):
        if not own.has_work:
            break
        own.work()
    own._thread.submit(int).result()
    return own.offer()


def test_it_learns_a_narrow_text_and_goes_on_from_what_it_learnt(
    spec: Eagle3Spec, serving: Eagle3Head, tmp_path: Path
) -> None:
    ids = serving.vocab.target_ids
    assert ids is not None
    cycle = ids[100:104].tolist() * 12
    own = learner(spec, serving, tmp_path)
    assert not own.has_work
    fill(own, lambda _: cycle, 160)
    offered = None
    for _ in range(20):
        if offered := run(own):
            break
        fill(own, lambda _: cycle, 80)
    assert offered == str(tmp_path / "000001")
    assert not own.has_work, "it waits for the swap"
    head = Eagle3Head.load(spec, offered, BUNDLED / "target")  # an ordinary head
    assert torch.equal(head._final_norm_H, own._candidate.norm.weight)
    entry = json.loads((tmp_path / "000001" / "training.json").read_text())["learnt"][-1]
    assert entry["gain"] > learning.SURE * entry["standard_error"] and entry["from"] == str(FOLDER)
    momentum = own._optimisers[0]
    own.rebase(offered)
    assert own.has_work and own._optimisers[0] is momentum, "it goes on learning"
    own.rebase(str(FOLDER))
    assert own._optimisers[0] is not momentum and not own.reservoir.learnt, "another head took its place"


def test_noise_never_takes_a_head_and_a_worse_one_is_dropped(
    spec: Eagle3Spec, serving: Eagle3Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = serving.vocab.target_ids
    assert ids is not None
    generator = torch.Generator().manual_seed(2)

    def noise(_: int) -> list[int]:
        return ids[torch.randint(len(ids), (WINDOW,), generator=generator)].tolist()

    own = learner(spec, serving, tmp_path)
    for _ in range(3):
        fill(own, noise, 100)
        assert run(own, 120) is None
    assert learnt_heads(tmp_path) == []
    fill(own, noise, 100)
    assert not torch.equal(own._candidate.lm_head.weight, own._serving.lm_head.weight)
    draws = iter(torch.rand(1000, generator=generator).tolist())
    monkeypatch.setattr(own, "_score", lambda head, _: next(draws) + (0.0 if head is own._candidate else 1.0))
    list(own._judge())
    assert torch.equal(own._candidate.lm_head.weight, own._serving.lm_head.weight)


def test_a_head_that_a_tenant_would_lose_by_is_not_taken(
    spec: Eagle3Spec, serving: Eagle3Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = learner(spec, serving, tmp_path)
    lost = [Window(torch.zeros(20), torch.zeros(20, WIDTH), 1, 0.0, math.inf) for _ in range(4)]
    own.reservoir.held = {1: lost}
    draws = iter(torch.rand(1000, generator=torch.Generator().manual_seed(2)).tolist())

    def score(head: learning.Network, window: Window) -> float:
        gained = 0.0 if head is own._serving else -1.0 if any(window is one for one in lost) else 2.0
        return next(draws) + gained

    monkeypatch.setattr(own, "_score", score)
    for is_taken in (False, True):
        fill(own, lambda id: [id] * WINDOW, 100)
        list(own._judge())
        assert (own._saving is not None) == is_taken
        own.reservoir.held.clear()


def test_a_head_that_took_over_meanwhile_is_not_replaced_by_one_that_was_compared_with_the_head_before(
    spec: Eagle3Spec, serving: Eagle3Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = learner(spec, serving, tmp_path)
    monkeypatch.setattr(own, "_score", lambda head, window: float(head is own._candidate) + window.begin)
    fill(own, lambda id: [id] * WINDOW, 100)
    list(own._judge())
    assert own._saving is not None
    own._saving.result()
    other = copytree(FOLDER, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["norm.weight"] += 1.0
    save_file(weights, other / "model.safetensors")
    own.rebase(str(other))  # by an administrator
    assert own.offer() is None


def test_few_heads_stay_on_disk_and_half_a_one_is_none(tmp_path: Path) -> None:
    for _ in range(5):
        state = {"norm.weight": torch.ones(WIDTH)}
        write_head(tmp_path, FOLDER, state, {"gain": 1.0})
    (tmp_path / "000009").mkdir()
    assert [folder.name for folder in learnt_heads(tmp_path)] == ["000003", "000004", "000005"]
    assert torch.equal(load_file(tmp_path / "000005" / "model.safetensors")["norm.weight"], torch.ones(WIDTH))


def test_the_gain_has_the_standard_error_of_the_differences() -> None:
    assert gain([(0.0, 1.0), (1.0, 1.0), (0.0, 2.0)]) == (1.0, pytest.approx(1 / 3**0.5))


def test_other_drafters_are_refused_with_a_way_out(spec: Eagle3Spec, tmp_path: Path) -> None:
    assert why_not_learnable(spec, FOLDER, device="cpu", ranks=1) is None
    for told, why in (
        ("EAGLE-3", why_not_learnable(None, FOLDER, device="cpu", ranks=1)),
        ("CPU", why_not_learnable(spec, FOLDER, device="cuda", ranks=1)),
        ("tensor_parallel_size 1", why_not_learnable(spec, FOLDER, device="cpu", ranks=2)),
        ("SafeAILab", why_not_learnable(spec, tmp_path, device="cpu", ranks=1)),
    ):
        assert why is not None and told in why


def test_learning_waits_for_messages(spec: Eagle3Spec, serving: Eagle3Head, tmp_path: Path) -> None:
    own = learner(spec, serving, tmp_path)
    own._gaps_s.extend([0.2, 0.2])
    own._slices_s.extend([0.01])
    own.saw(message({1: (1, [1])}))
    assert own.wait_s == 0.0, "a slice fits before the next message"
    own._gaps_s.append(0.005)
    assert 0 < own.wait_s <= learning.QUIET_S
    own._replied_s -= 1.0
    assert own.wait_s == 0.0, "nothing runs"
