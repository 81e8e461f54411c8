"""The Gumbel cache returns the values of `gumbel`, independent of earlier calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import workers.sampling.gumbel_cache
from drafter.drafter import Drafter
from drafter.tree.frontier import DraftVocabulary
from workers.sampling.gumbel_cache import GumbelCache
from workers.sampling.philox import gumbel
from workers.settings import Rule

torch.set_num_threads(1)

SEEDS, INDICES = [1, 1, 1, 2, 2, -1, 1], [5, 5, 6, 6, 6, 6, 5]


def truth(seeds: list[int], indices: list[int], start: int = 3, stop: int = 30) -> torch.Tensor:
    return gumbel(torch.tensor(seeds), torch.tensor(indices), start, stop)


def test_rows_are_each_keys_own_noise():
    assert torch.equal(GumbelCache(3, 30).rows(SEEDS, INDICES, "cpu"), truth(SEEDS, INDICES))


def test_equal_rows_are_computed_once():
    assert torch.equal(GumbelCache(3, 30).rows([4, 4], [9, 9], "cpu"), truth([4], [9]))


def test_some_ids_see_the_noise_of_the_whole_vocabulary():
    ids = torch.tensor([7, 2, 40])
    rows = GumbelCache(0, 50, ids).rows(SEEDS, INDICES, "cpu")
    assert torch.equal(rows, truth(SEEDS, INDICES, 0, 50)[:, ids])


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_the_caches_content_does_not_change_the_noise(most, monkeypatch):
    monkeypatch.setattr(workers.sampling.gumbel_cache, "MAX_BYTES", most * 4 * 27)
    cache = GumbelCache(3, 30)
    for step in range(5):
        cache.prepare([8, 9], [step, 2 * step], [4, 0], "cpu")
        seeds, indices = [8, 9, 8], [step + 3, 2 * step, step]
        assert torch.equal(cache.rows(seeds, indices, "cpu"), truth(seeds, indices))


def test_prepared_noise_is_not_computed_again(monkeypatch):
    cache = GumbelCache(3, 30)
    cache.prepare([8], [5], [4], "cpu")
    monkeypatch.setattr(workers.sampling.gumbel_cache, "gumbel", None)
    assert torch.equal(cache.rows([8, 8], [5, 8], "cpu"), truth([8, 8], [5, 8]))


def test_token_by_token_decoding_mostly_hits_the_cache(monkeypatch):
    """A hundred rows of 27 values fit: those of one request in sixteen steps, or of ten in ten."""
    monkeypatch.setattr(workers.sampling.gumbel_cache, "_VALUES_AHEAD", 100 * 27)
    calls = []
    cache = GumbelCache(3, 30, make=lambda seeds, *own: calls.append(len(seeds)) or gumbel(seeds, *own))
    for index in range(32):
        assert torch.equal(cache.rows([1], [index], "cpu"), truth([1], [index]))
    for index in range(20):
        assert torch.equal(cache.rows([*range(2, 12)], [index] * 10, "cpu"), truth([*range(2, 12)], [index] * 10))
    assert calls == [16, 16, 100, 100]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(workers.sampling.gumbel_cache, "MAX_BYTES", 10 * 4 * 27)
    cache = GumbelCache(3, 30)
    for index in range(100):
        cache.rows([1], [index], "cpu")
    assert len(cache._row) == 10


def test_more_rows_than_the_cache_holds_are_not_kept(monkeypatch):
    monkeypatch.setattr(workers.sampling.gumbel_cache, "MAX_BYTES", 10 * 4 * 27)
    cache = GumbelCache(3, 30)
    assert torch.equal(cache.rows([1] * 30, list(range(30)), "cpu"), truth([1] * 30, list(range(30))))
    held = {row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in cache._row.values()}
    assert len(cache._row) == 10 and sum(held.values()) == 10 * 4 * 27


def test_a_drafter_that_looks_ahead_has_the_noise_of_the_next_trees(monkeypatch):
    """Four requests with roots at 9, 19, 29 and 39, of which only the first needs noise: the others' drafts are
    sampled, their temperature is 0, or they are only fed."""
    request = SimpleNamespace(
        num_nodes_B=torch.tensor([4, 4, 4, 0]),
        rule_B=torch.tensor([Rule.COUPLED, Rule.TRAVERSAL, Rule.COUPLED, Rule.COUPLED]),
        start_B=torch.tensor([7, 17, 27, 37]),
        offsets=torch.tensor([0, 3, 6, 9, 12]),
        max_depth_B=torch.tensor([3, 3, 3, 3]),
        sampling=SimpleNamespace(temperature_B=torch.tensor([1.0, 1.0, 0.0, 1.0]), seed_B=torch.tensor([1, 2, 3, 4])),
    )
    vocab = DraftVocabulary(target_size=30)
    drafter = Drafter(SimpleNamespace(vocab=vocab), None)  # type: ignore[arg-type]
    drafter.prefetch_noise(request, torch.device("cpu"))  # type: ignore[arg-type]
    monkeypatch.setattr(workers.sampling.gumbel_cache, "gumbel", None)
    for root in range(9, 9 + 3 + 2):  # the next root: all, some or nothing of the tree was accepted
        indices = [root + depth for depth in (1, 2, 3)]
        assert torch.equal(vocab.noise.rows([1] * 3, indices, "cpu"), truth([1] * 3, indices, 0, 30))
    assert {seed for seed, _ in vocab.noise._row} == {1}
