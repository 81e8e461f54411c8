"""A head takes the weights of another one: as objects, or at the addresses that CUDA graphs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.head_loader import HeadLoader
from drafter.proposers.eagle3 import Eagle3Head
from drafter.proposers.feature_head import replace_weights
from tests.support.checkpoints import write_eagle3, write_model
from workers.models.eagle3_format import read_eagle3_spec
from workers.models.layers import SINGLE, Runtime
from workers.models.readers import read_spec
from workers.types import HeadProgress, NewHead, as_bytes, as_text

FLOAT64 = Runtime(dtype=torch.float64)
"""In which no weight is packed on CPU, as on GPUs."""


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[Path]]:
    folder = tmp_path_factory.mktemp("heads")
    target = write_model(folder / "target", "llama")
    paths = [write_eagle3(folder / f"head{seed}", seed=seed) for seed in (1, 2)]
    return read_eagle3_spec(paths[0], read_spec(target)), target, paths


@pytest.mark.parametrize("in_place", [False, True])
def test_a_head_computes_what_the_other_one_does(heads: tuple[Any, Path, list[Path]], in_place: bool) -> None:
    spec, target, paths = heads
    old, new, same = (Eagle3Head.load(spec, path, target, FLOAT64) for path in (*paths, paths[1]))
    vocab, address = old.vocab, old._final_norm_H.data_ptr()
    x_MH = torch.randn(3, old.width, dtype=torch.float64)
    assert not torch.equal(old.logits(x_MH), new.logits(x_MH))
    replace_weights(old, new, in_place=in_place)
    assert torch.equal(old.logits(x_MH), same.logits(x_MH))
    assert old.vocab is vocab and (old._final_norm_H.data_ptr() == address) == in_place


class OneRank:
    """A rank, as far as loading a head reads it."""

    role, tp = "drafter 0", SINGLE


def run(loader: HeadLoader) -> tuple[HeadProgress, str]:
    while True:
        state = loader.answer(NewHead(path_U=as_bytes("/heads/é")))
        if state.progress != HeadProgress.LOADING:
            return HeadProgress(state.progress), as_text(state.reason_U)


def test_a_failed_head_says_why_and_the_next_one_is_taken() -> None:
    taken: list[Any] = []
    outcomes = iter([OSError("no such file"), "a head"])

    def load(path: str) -> Any:
        assert path == "/heads/é"
        if isinstance(outcome := next(outcomes), Exception):
            raise outcome
        return outcome

    loader = HeadLoader(OneRank(), load, taken.append)  # type: ignore[arg-type]
    assert run(loader) == (HeadProgress.FAILED, "no such file") and not taken
    assert run(loader) == (HeadProgress.TAKEN, "") and taken == ["a head"]


def test_a_head_of_another_layout_is_not_taken(heads: tuple[Any, Path, list[Path]]) -> None:
    spec, target, paths = heads
    old, packed = Eagle3Head.load(spec, paths[0], target, FLOAT64), Eagle3Head.load(spec, paths[1], target)
    loader = HeadLoader(OneRank(), lambda _: packed, lambda head: replace_weights(old, head, in_place=True))  # type: ignore[arg-type]
    progress, reason = run(loader)
    assert progress == HeadProgress.FAILED and "another layout" in reason
