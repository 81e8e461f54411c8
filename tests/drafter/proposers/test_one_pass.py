"""P-EAGLE heads equal a plain float64 implementation of the published description, and refuse what lacks a mask.

The proposer is fed as the engine feeds it (scattered pages, chunks, two requests), then asked for tree levels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.proposers.base import head_graphs
from drafter.proposers.eagle3 import PEagleHead
from drafter.proposers.one_pass import OnePassProposer, ScratchPages
from tests.drafter.proposers.test_block import PAGE, PAGES, assert_close, feed, frontier
from tests.support import checkpoints
from tests.support.plain_peagle import PlainPEagle
from workers.config import EngineConfig
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.fusion import load_fusion
from workers.models.readers import read_spec

torch.set_num_threads(1)

DEPTH = 5
SPECULATORS = {
    "architectures": ["PEagleDraftModel"],
    "speculators_model_type": "peagle",
    "mask_token_id": 2,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 8}]},
}

HEADS: dict[str, dict[str, Any]] = {
    "AWS, four layers": {"style": "specforge", "parallel": {"ptd_token_id": 7}, "num_hidden_layers": 4},
    "SpecForge": {"parallel": {"architectures": ["PEagleDraftModel"], "mask_token_id": 3}, "with_embedding": False},
    "speculators": {"style": "speculators", "parallel": SPECULATORS, "num_hidden_layers": 2},
    "speculators with norms": {
        "style": "speculators",
        "parallel": SPECULATORS,
        "norm_before_residual": True,
        "norm_before_fc": True,
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_model(tmp_path_factory.mktemp("target"), "llama")


def load(path: Path, target: Path) -> PEagleHead:
    head = PEagleHead.load(read_eagle3_spec(path, read_spec(target)), path, target)
    head.set_depth(DEPTH)
    return head


@pytest.mark.parametrize("is_padded", [False, True], ids=["as it is", "padded as in graphs"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_equals_the_published_description(tmp_path: Path, target: Path, name: str, is_padded: bool) -> None:
    """Prompts in chunks, then two steps in which both requests grow a tree behind more committed tokens."""
    path = checkpoints.write_eagle3(tmp_path, **HEADS[name])
    plain = PlainPEagle(path, target)
    spec = read_eagle3_spec(path, read_spec(target))
    assert spec.has_marginals and spec.max_depth == (8 if "speculators" in name else None)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (15, 11)]
    taps = [torch.randn(len(history) - 1, 192, generator=generator) for history in tokens]
    fusion = load_fusion(path, spec)
    features = [fusion(own) for own in taps]

    head = load(path, target)
    scratch = ScratchPages(PAGES, PAGE, DEPTH - 1)
    kv = head.new_kv_pool((PAGES + 2 * scratch.per_request) * PAGE)
    with torch.inference_mode():
        kv.data.fill_(7.0)  # reading slot 0 or an unwritten slot changes the result
        config = EngineConfig(model_path=str(target), page_size=PAGE, max_num_seqs=2, max_model_len=16)
        graphs = head_graphs(head, kv, config, scratch.per_request, is_captured=False) if is_padded else None
        proposer = OnePassProposer(head, kv, PAGE, scratch, graphs)
        assert proposer.extend(feed(tokens, features, [1, 1], [7, 3])).shape == (0, len(plain.target_ids))
        start = [7, 3]
        for stop in ([12, 8], [15, 11]):
            histories = [own[:end] for own, end in zip(tokens, stop, strict=True)]
            roots = proposer.extend(feed(histories, features, start, stop))
            start = stop
            expected = [plain.logits(own, taps[g][: len(own) - 1], DEPTH) for g, own in enumerate(histories)]
            for g in range(2):
                assert_close(roots[g], expected[g][0])
            for depth in range(1, DEPTH):
                level = proposer.expand(frontier(depth, [0, 0, 1], [17, 60, 5]))
                for row, g in enumerate([0, 0, 1]):
                    assert_close(level[row], expected[g][depth])


def test_only_requests_that_grow_have_mask_rows(tmp_path: Path, target: Path) -> None:
    path = checkpoints.write_eagle3(tmp_path, **HEADS["AWS, four layers"])
    head = load(path, target)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (9, 11)]
    features = [torch.randn(len(own) - 1, 64, generator=generator) for own in tokens]

    def roots(stop: list[int]) -> torch.Tensor:
        scratch = ScratchPages(PAGES, PAGE, DEPTH - 1)
        kv = head.new_kv_pool((PAGES + 2 * scratch.per_request) * PAGE)
        return OnePassProposer(head, kv, PAGE, scratch).extend(feed(tokens, features, [1, 1], stop))

    both, second = roots([9, 11]), roots([4, 11])
    assert (len(both), len(second)) == (2, 1)
    torch.testing.assert_close(both[1], second[0])


@pytest.mark.parametrize("mask", [None, 96, "7"])
def test_a_head_without_its_mask_token_is_refused(tmp_path: Path, target: Path, mask: Any) -> None:
    parallel = {"architectures": ["PEagleDraftModel"], "mask_token_id": mask}
    path = checkpoints.write_eagle3(tmp_path, parallel=parallel)
    with pytest.raises(ValueError, match=f"is {mask}; write the one that it was trained with as mask_token_id"):
        read_eagle3_spec(path, read_spec(target))


def test_a_mask_feature_of_another_width_is_refused(tmp_path: Path, target: Path) -> None:
    path = checkpoints.write_eagle3(tmp_path, **HEADS["speculators"])
    checkpoints.edit_weights(path, add={"mask_hidden": torch.ones(1, 1, 64)})
    with pytest.raises(ValueError, match="mask_hidden has 64 values, this target needs 192"):
        load(path, target)


def test_the_learned_feature_changes_deeper_tokens_alone(tmp_path: Path, target: Path) -> None:
    """A head that is read with another mask raises no error: drafts are only accepted less often."""
    path = checkpoints.write_eagle3(tmp_path, **HEADS["speculators"])
    tokens, taps = [5, 9, 4], torch.randn(2, 192, generator=torch.Generator().manual_seed(0))
    right = PlainPEagle(path, target).logits(tokens, taps, 3)
    checkpoints.edit_weights(path, add={"mask_hidden": torch.ones(1, 1, 192)})
    wrong = PlainPEagle(path, target).logits(tokens, taps, 3)
    assert torch.equal(right[0], wrong[0]) and not torch.allclose(right[1:], wrong[1:], atol=0.1)
