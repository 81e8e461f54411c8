"""Philox equals the published algorithm, and Gumbel noise is finite and depends only on its keys."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

import workers.sampling.philox
from tests.support import oracles
from workers.sampling.philox import Stream, below, gumbel, gumbel_at, philox, uniform, words64

torch.set_num_threads(1)

ALL_ONES = 2**32 - 1


def words(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    seed = key[0] | key[1] << 32
    seed_1 = torch.tensor([seed - 2**64 if seed >> 63 else seed])
    c0, c1, c2 = (torch.tensor([c]) for c in counter[:3])
    return tuple(int(w) for w in philox(seed_1, c0, c1, c2, counter[3]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_papers_known_answers(counter, key, expected):
    assert words(key, counter) == expected
    assert oracles.philox(key, counter) == expected


def test_philox_agrees_with_big_integer_arithmetic_on_random_keys():
    draw = np.random.default_rng(0).integers(0, 2**32, size=(200, 6)).tolist()
    for k0, k1, *counter in draw:
        assert words((k0, k1), tuple(counter)) == oracles.philox((k0, k1), tuple(counter))


def test_philox_gives_equal_words_for_tensors_arrays_and_integers():
    keys = torch.from_numpy(np.random.default_rng(1).integers(0, 2**32, size=(4, 100)))
    tensors = philox(*keys, Stream.RESIDUAL)
    arrays = philox(*keys.numpy(), Stream.RESIDUAL)
    assert all(np.array_equal(a, t.numpy()) for a, t in zip(arrays, tensors, strict=True))
    integers = zip(*(philox(*key, Stream.RESIDUAL) for key in keys.T.tolist()), strict=True)
    assert all(list(i) == t.tolist() for i, t in zip(integers, tensors, strict=True))


def test_philox_broadcasts_its_keys():
    seeds, c0, c1, c2 = np.array([[-1], [2**62]]), np.arange(3), np.array([[7], [8]]), np.array([5])
    together = philox(seeds, c0, c1, c2, Stream.DRAFT)
    apart = philox(*(torch.from_numpy(key.copy()) for key in np.broadcast_arrays(seeds, c0, c1, c2)), Stream.DRAFT)
    assert all(np.array_equal(a, t.numpy()) for a, t in zip(together, apart, strict=True))


def test_gumbel_is_keyed_on_seed_index_and_target_id():
    for seed in (0, 5, 2**63 - 1, 2**64 - 3):
        noise = gumbel(torch.tensor([seed - 2**64 if seed >> 63 else seed] * 2), torch.tensor([3, 70000]), 0, 10)
        expected = [[oracles.gumbel(seed, index, token) for token in range(10)] for index in (3, 70000)]
        torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_noise_at_single_tokens_is_that_of_whole_rows_however_long_the_text_is():
    for index in (3, 70000, 2**31 - 1):
        row = gumbel(torch.tensor([-5]), torch.tensor([index]), 0, 10)[0].numpy()
        assert np.array_equal(gumbel_at(np.int64(-5), np.int64(index), np.arange(10)), row)


def test_every_seed_position_row_and_index_has_a_number_of_its_own():
    """Check all positions of one step and the last position of a long text."""
    seeds, positions = np.array([1, 2, 2**40]), np.array([0, 1, 65536, 131071])
    keys = np.ix_(seeds, positions, np.arange(64), np.arange(8))
    numbers = uniform(*keys, Stream.DRAFT)
    assert numbers.shape == (3, 4, 64, 8) and len(np.unique(numbers)) == numbers.size


@pytest.mark.parametrize("r", [0, 1, 2, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 257, 2**32 - 2, ALL_ONES])
def test_gumbel_is_finite_and_accurate_for_every_word(monkeypatch, r):
    monkeypatch.setattr(workers.sampling.philox, "philox", lambda seed, c0, *_: (c0 * 0 + r,) * 4)
    noise = gumbel(torch.tensor([1]), torch.tensor([1]), 0, 4)
    assert torch.isfinite(noise).all()
    # Near its zero at u = 1/e the noise is a difference of float32 logs: absolute, not relative, accuracy.
    torch.testing.assert_close(noise[0, 0].item(), oracles.gumbel_of_word(r), rtol=1e-6, atol=3e-7)


def test_gumbel_rises_with_the_word_across_the_middle(monkeypatch):
    monkeypatch.setattr(workers.sampling.philox, "philox", lambda seed, c0, *_: (c0 * 64 + 2**31 - 2048,) * 4)
    noise = gumbel(torch.tensor([1]), torch.tensor([1]), 0, 4 * 64)[0, ::4]
    assert (noise.diff() >= 0).all()


@pytest.mark.parametrize("cuts", [[0, 101], [0, 1, 101], [0, 3, 6, 50, 101], [0, 4, 64, 101], [0, 99, 101]])
def test_noise_does_not_depend_on_vocabulary_shards(cuts):
    seeds, indices = torch.tensor([7, -7, 7]), torch.tensor([1, 1, 2])
    shards = [gumbel(seeds, indices, a, b) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(shards, dim=1), gumbel(seeds, indices, 0, 101))


def test_noise_does_not_depend_on_the_batch():
    seeds, indices = torch.arange(40), torch.arange(40) * 3
    together = gumbel(seeds, indices, 0, 50)
    alone = torch.cat([gumbel(seeds[i : i + 1], indices[i : i + 1], 0, 50) for i in range(40)])
    assert torch.equal(together, alone)


def test_uniforms_take_all_of_their_64_bits():
    limits = np.array([1, 2, 3, 1000, 64 * 65535, 2**31, *[2**31 - 1] * 50], dtype=np.int64)
    seeds = -np.arange(len(limits))
    keys = (np.int64(9), np.int64(2), np.int64(1))  # root position, row, index
    words = [oracles.philox((s % 2**32, s % 2**64 >> 32), (1, 9, 2, Stream.DRAFT)) for s in seeds.tolist()]
    bits = [high << 32 | low for high, low, _, _ in words]
    drawn = below(limits, *words64(seeds, *keys, Stream.DRAFT))
    assert drawn.tolist() == [u * limit >> 64 for u, limit in zip(bits, limits.tolist(), strict=True)]
    assert uniform(seeds, *keys, Stream.DRAFT).tolist() == [(u >> 11) / 2**53 for u in bits]
    many = uniform(np.arange(20000), *keys, Stream.ACCEPT)
    assert many.max() < 1 and scipy.stats.kstest(many, "uniform").pvalue > 1e-3


def test_gumbel_follows_the_gumbel_law():
    noise = gumbel(torch.full((100,), 11), torch.arange(100), 0, 1000)
    assert scipy.stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3


def test_every_32_bit_word_is_uniform_in_its_high_and_low_bits():
    c = torch.arange(1 << 14)
    for word in philox(torch.tensor([3]), c, torch.zeros_like(c), torch.zeros_like(c), Stream.ACCEPT):
        assert scipy.stats.chisquare(np.bincount(word.numpy() >> 26, minlength=64)).pvalue > 1e-4
        assert scipy.stats.chisquare(np.bincount(word.numpy() & 63, minlength=64)).pvalue > 1e-4


def test_neighbouring_keys_are_uncorrelated():
    seeds, indices = torch.full((400,), 5), torch.arange(400)
    base = gumbel(seeds, indices, 0, 400)
    for other in (gumbel(seeds, indices + 1, 0, 400), gumbel(seeds + 1, indices, 0, 400), base.roll(1, dims=1)):
        correlation = np.corrcoef(base.flatten().numpy(), other.flatten().numpy())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(base.numel())


def test_streams_do_not_share_words():
    c = torch.arange(1000)
    zero = torch.zeros_like(c)
    seen = [philox(torch.tensor([9]), c, zero, zero, stream)[0] for stream in Stream]
    for i, j in ((0, 1), (0, 2), (1, 3), (2, 3)):
        assert not (seen[i] == seen[j]).any()


def test_torchs_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    gumbel(torch.tensor([1]), torch.tensor([1]), 0, 100)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_single_tokens_have_the_noise_of_whole_rows():
    seeds, indices = np.array([7, -7, 2**62]), np.array([1, 70000, 2])
    tokens = np.array([[0, 100, 50, 3], [1, 1, 2, 97], [99, 6, 5, 4]])
    rows = gumbel(torch.from_numpy(seeds), torch.from_numpy(indices), 0, 101).numpy()
    assert np.array_equal(gumbel_at(seeds[:, None], indices[:, None], tokens), np.take_along_axis(rows, tokens, 1))


def test_the_noise_of_a_device_is_that_of_the_host():
    seeds, indices = torch.tensor([[7], [-7], [2**62]]), torch.tensor([[1], [70000], [2]])
    made = workers.sampling.philox._gumbel_in_torch(seeds, indices, 3, 40)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, gumbel(seeds[:, 0], indices[:, 0], 12, 160), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("at_once", [4, 40, 300])
def test_noise_does_not_depend_on_the_chunk_size(monkeypatch, at_once):
    seeds, indices = torch.tensor([7, -7, 7, 8, 9]), torch.tensor([1, 1, 2, 3, 4])
    whole = gumbel(seeds, indices, 5, 101)
    monkeypatch.setattr(workers.sampling.philox, "_VALUES_AT_ONCE", at_once)
    assert torch.equal(gumbel(seeds, indices, 5, 101), whole)
