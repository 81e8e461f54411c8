"""Counter-based random numbers: equal keys give equal numbers on any rank, in any batch and in any order.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is the request's 64-bit
seed, and the four counter words identify the draw. torch's global generator is not used.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any  # torch.Tensor or numpy.ndarray of int64, or int
_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_VALUES_AT_ONCE = 32768
"""Block size of noise on CPU: it fits a core's cache, and smaller blocks are dominated by call overhead."""


class Stream(IntEnum):
    """The fourth counter word, which makes the streams disjoint."""

    TARGET_GUMBEL = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox(seed: Array, c0: Array, c1: Array, c2: Array, stream: Stream) -> tuple[Array, Array, Array, Array]:
    """Return four 32-bit words (as int64 in [0, 2^32)) per broadcast element of the key and counter words.

    seed: int64, of which all 64 bits are used. c0, c1, c2: int64 in [0, 2^32). Tensors, arrays and integers work alike:
    a product of two 32-bit numbers fills 64 bits, int64 wraps, and an arithmetic shift followed by the mask yields the
    exact high word.
    """
    if any(isinstance(word, np.ndarray) for word in (seed, c0, c1, c2)):
        return _philox_in_numpy(seed, c0, c1, c2, stream)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c3 = c0 * 0 + int(stream)
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def _philox_in_numpy(seed: Array, c0: Array, c1: Array, c2: Array, stream: Stream) -> tuple[Array, Array, Array, Array]:
    """`philox` with a third of the numpy calls, which dominate the cost of small arrays.

    The pairs (c0, c2) and (c1, c3) are processed together, and 32-bit words need no shifts and masks.
    """
    shape = np.broadcast_shapes(*map(np.shape, (seed, c0, c1, c2)))
    pair = (2,) + (1,) * len(shape)
    even, odd = np.empty((2, *shape), dtype=np.uint32), np.empty((2, *shape), dtype=np.uint32)
    even[0], even[1], odd[0], odd[1] = c0, c2, c1, int(stream)
    key = np.array([seed & _MASK, (seed >> 32) & _MASK], dtype=np.uint32)
    key = key.reshape(2, *(1,) * (len(shape) - np.ndim(seed)), *np.shape(seed))
    factor = np.array([_M0, _M1], dtype="<u8").reshape(pair)
    step = np.array([_W0, _W1], dtype=np.uint32).reshape(pair)
    for _ in range(_ROUNDS):
        halves = (even * factor)[::-1].view("<u4")  # low and high word of each product in turn
        even, odd = halves[..., 1::2] ^ odd ^ key, halves[..., ::2]
        key = key + step
    c0, c2 = even.astype(np.int64)
    c1, c3 = odd.astype(np.int64)
    return c0, c1, c2, c3


def gumbel(seed_R: Tensor, index_R: Tensor, start: int, stop: int) -> Tensor:
    """Return float32 Gumbel noise [R, stop - start] for target token ids [start, stop).

    Row r's noise is keyed on (seed_R[r], index_R[r], token id), where index is the position of the token being drawn:
    after a prefix of n tokens it is n, in prefill, decode and replay alike. One Philox call serves four adjacent token
    ids: counter word 0 is id // 4, and id % 4 selects the word.
    """
    first, last = start // 4, (stop + 3) // 4
    seed_R1, index_R1 = seed_R[:, None], (index_R.long() & _MASK)[:, None]
    if seed_R.device.type == "cpu":
        noise_RV = torch.from_numpy(_gumbel_in_numpy(seed_R1.numpy(), index_R1.numpy(), first, last))
    else:
        noise_RV = _gumbel_in_torch(seed_R1, index_R1, first, last)
    return noise_RV[:, start - 4 * first : stop - 4 * first]


def _gumbel_in_torch(seed_R1: Tensor, index_R1: Tensor, first: int, last: int) -> Tensor:
    """Compute the noise of tokens [4 first, 4 last) on the keys' device."""
    c0 = torch.arange(first, last, device=seed_R1.device)
    words = torch.stack(philox(seed_R1, c0, index_R1, 0, Stream.TARGET_GUMBEL), dim=-1)
    u = (words.reshape(len(seed_R1), -1).double() + 0.5) * 2.0**-32
    return (-(-u.log()).log()).float()


def _gumbel_in_numpy(seed_R1: np.ndarray, index_R1: np.ndarray, first: int, last: int) -> np.ndarray:
    """`_gumbel_in_torch` for the CPU: numpy's small operations take a third of torch's time, and its logarithm half."""
    noise_RV = np.empty((len(seed_R1), 4 * (last - first)), dtype=np.float32)
    most = _VALUES_AT_ONCE // 4
    columns = min(last - first, most)
    rows = max(1, most // columns)
    for r in range(0, len(seed_R1), rows):
        seed, index, of_rows = seed_R1[r : r + rows], index_R1[r : r + rows], noise_RV[r : r + rows]
        for c in range(first, last, columns):
            words = philox(seed, np.arange(c, min(c + columns, last)), index, 0, Stream.TARGET_GUMBEL)
            block = _gumbel_of_words(np.stack(words, axis=-1).reshape(len(seed), -1))
            of_rows[:, 4 * (c - first) :][:, : block.shape[1]] = block
    return noise_RV


def gumbel_at(seed: Array, index: Array, token: Array) -> np.ndarray:
    """Return `gumbel` at single target token ids, float32 per broadcast element of int64 numpy arrays."""
    seed, index, token = np.broadcast_arrays(seed, index, token)
    words = np.stack(philox(seed, token // 4, index & _MASK, 0, Stream.TARGET_GUMBEL), axis=-1)
    return _gumbel_of_words(np.take_along_axis(words, (token % 4)[..., None], -1)[..., 0])


def uniform(seed: Array, root_position: Array, row: Array, index: Array, stream: Stream) -> Array:
    """Return uniforms in [0, 1), float64 with 53 random bits, per broadcast element of the keys (int64 or ints)."""
    high, low = words64(seed, root_position, row, index, stream)
    return (high * 2.0**21 + (low >> 11)) * 2.0**-53


def words64(seed: Array, root_position: Array, row: Array, index: Array, stream: Stream) -> tuple[Array, Array]:
    """Return the high and low halves of 64 random bits, int64 in [0, 2^32) each, keyed like `uniform`."""
    high, low, _, _ = philox(seed, index, root_position, row, stream)
    return high, low


def below(limit: Array, high: Array, low: Array) -> np.ndarray:
    """Return uniform integers in [0, limit) from 64 random bits u, for limit <= 2^31.

    The result is floor(u limit / 2^64): no integer's probability is off by more than 2^-64.
    """
    return (high * limit + (low * limit >> 32)) >> 32


def _gumbel_of_words(r: np.ndarray) -> np.ndarray:
    """Return float32 -log(-log u) with u = (r + 0.5) 2^-32, which is exact in float64."""
    return (-np.log(-np.log((r + 0.5) * 2.0**-32))).astype(np.float32)
