"""All-reduce among the GPUs of one node through peer memory, in one launch: for sums too small to wait for NCCL.

    PeerAllReduce(own, addresses_T, rank, dtype).sum_(x) -> bool        num_bytes(num_ranks) -> int

A decoding step sums some hundred KB twice a layer. NCCL takes 12 to 20 us for that, most of them in its protocol. Here
every program copies its part of `x` to its own GPU's memory, tells the same program of every other rank, waits for
theirs, and reads. Small sums are read whole by every rank ("one-shot"). Of larger ones every rank sums one part of
each block, and all read the parts ("two-shot"), which moves 2 instead of T times the bytes.

Both add in float32 in the order of the ranks and round once, so all ranks have equal results, and a row's sum does not
depend on the number of rows beside it.

Memory of each rank, which all others can read and write:

    signals    int32 [2, _PROGRAMS, T]    the last run in which a rank's program had copied / had summed
    blocks     [2, 2, values]             by parity of the run: the copies, and the sums of own parts

A run's number is the program's own count, kept on the device, so that replayed graphs count on. Even and odd runs have
blocks of their own. A rank overwrites those of run k in run k + 2. By then every rank has signalled run k + 1, so its
kernel of run k has ended. The programs of a launch must all run at once, so there are few, and each takes every
_PROGRAMS-th block. A block always has the same program, whatever the size of `x`.

Legend: T ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 32
"""Few enough to run at once: an A100 has 108 multiprocessors."""
_BLOCK_BYTES = 8192
_WORD_BYTES = 16
"""The bytes that a thread loads at once. The compiler must see that addresses and sizes are multiples of them."""
MOST_BYTES = 8 << 20
"""The largest sum, of 1024 rows of 4096 values in 16 bits. Larger ones are worth NCCL's pipelines."""
ONE_SHOT_BYTES = 512 << 10
"""Bytes times ranks up to which a sum is one-shot."""
MOST_RANKS = 8
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def num_bytes(num_ranks: int) -> int:
    """Return the bytes of peer memory that each rank provides, zeroed."""
    return _signal_bytes(num_ranks) + 4 * MOST_BYTES


def _signal_bytes(num_ranks: int) -> int:
    return 2 * _PROGRAMS * num_ranks * 4


class PeerAllReduce:
    """Sums over the ranks, which all construct it and call it in the same order.

    Args:
        own: uint8 [num_bytes], zeros on this rank's device, which the other ranks have mapped.
        addresses_T: of every rank's such memory as mapped by this process.
        rank: this rank's place among them.
        dtype: of what it sums; one, because a block's place depends on its bytes.
    """

    def __init__(self, own: Tensor, addresses_T: list[int], rank: int, dtype: torch.dtype) -> None:
        self._own = own  # must outlive the others' accesses
        self._addresses_T = torch.tensor(addresses_T, dtype=torch.int64, device=own.device)
        self._rank, self._dtype = rank, dtype
        self._runs = torch.zeros(_PROGRAMS, dtype=torch.int32, device=own.device)

    def sum_(self, x: Tensor, most_looks: int = 0) -> bool:
        """Sum `x` over the ranks in place; False if it is too large, strided, of another dtype or no whole words.

        most_looks: stop waiting for another rank after so many looks at its signal; the sum is wrong then. 0 = never.
        """
        total = x.numel() * x.element_size()
        if not 0 < total <= MOST_BYTES or total % _WORD_BYTES or not x.is_contiguous() or x.dtype is not self._dtype:
            return False
        num_ranks = len(self._addresses_T)
        num_programs = min(_PROGRAMS, triton.cdiv(total, _BLOCK_BYTES))
        _sum_over_ranks[(num_programs,)](
            x, self._addresses_T, self._runs, total // _WORD_BYTES, self._rank, most_looks,
            IS_ONE_SHOT=total * num_ranks <= ONE_SHOT_BYTES, num_warps=8, **constants(num_ranks, x.dtype),
        )  # fmt: skip
        return True


def constants(num_ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernel's compile-time constants except `IS_ONE_SHOT`."""
    return dict(
        RANKS=num_ranks, LANES=triton.next_power_of_2(num_ranks), BLOCK=_BLOCK_BYTES // dtype.itemsize,
        WORD=_WORD_BYTES // dtype.itemsize,
        PROGRAMS=_PROGRAMS, SIGNAL_BYTES=_signal_bytes(num_ranks), REGION_BYTES=MOST_BYTES, DTYPE=_DTYPES[dtype],
    )  # fmt: skip


@triton.jit
def _meet(addresses_ptr, run, rank, most_looks, PHASE: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
          PROGRAMS: tl.constexpr):  # fmt: skip
    """Tell every rank's same program that this one has come this far in this run, and wait until all have."""
    tl.debug_barrier()  # what all threads have stored comes before the signal
    other = tl.arange(0, LANES)
    is_rank = other < RANKS
    address = tl.load(addresses_ptr + other, mask=is_rank, other=0)
    row = (PHASE * PROGRAMS + tl.program_id(0)) * RANKS
    there = address.to(tl.pointer_type(tl.int32)) + row + rank
    tl.atomic_xchg(there, run + tl.zeros([LANES], tl.int32), mask=is_rank, sem="release", scope="sys")
    here = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)) + row + other
    looks = 0
    is_waiting = True
    while is_waiting:
        # A difference, because counts wrap around, and because another rank may be one run ahead.
        seen = tl.atomic_add(here, tl.zeros([LANES], tl.int32), mask=is_rank, sem="acquire", scope="sys")
        looks += 1
        is_waiting = (tl.min(tl.where(is_rank, seen - run, 0), 0) < 0) & ((most_looks == 0) | (looks < most_looks))
    tl.debug_barrier()


@triton.jit
def _words(address, DTYPE: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit(do_not_specialize=["num_words", "rank", "most_looks"])
def _sum_over_ranks(
    x_ptr, addresses_ptr, runs_ptr, num_words, rank, most_looks,
    RANKS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, PROGRAMS: tl.constexpr,
    SIGNAL_BYTES: tl.constexpr, REGION_BYTES: tl.constexpr, DTYPE: tl.constexpr, IS_ONE_SHOT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    run = tl.load(runs_ptr + program) + 1
    copies = SIGNAL_BYTES + (run & 1).to(tl.int64) * (2 * REGION_BYTES)
    sums = copies + REGION_BYTES
    column = tl.arange(0, BLOCK)
    num_values = num_words * WORD
    num_blocks = tl.cdiv(num_values, BLOCK)
    own = tl.load(addresses_ptr + rank)
    own_copies = _words(own + copies, DTYPE)
    for block in range(program, num_blocks, PROGRAMS):
        value = block * BLOCK + column
        is_value = value < num_values
        tl.store(own_copies + value, tl.load(x_ptr + value, mask=is_value), mask=is_value)
    _meet(addresses_ptr, run, rank, most_looks, 0, RANKS, LANES, PROGRAMS)
    if IS_ONE_SHOT:
        for block in range(program, num_blocks, PROGRAMS):
            value = block * BLOCK + column
            is_value = value < num_values
            total = tl.zeros([BLOCK], tl.float32)
            for other in tl.static_range(RANKS):
                theirs = _words(tl.load(addresses_ptr + other) + copies, DTYPE)
                total += tl.load(theirs + value, mask=is_value, other=0.0).to(tl.float32)
            tl.store(x_ptr + value, total.to(DTYPE), mask=is_value)
    else:
        PART: tl.constexpr = BLOCK // LANES
        own_sums = _words(own + sums, DTYPE)
        for block in range(program, num_blocks, PROGRAMS):
            # With 3 ranks a block has 4 parts, and rank 0 sums the first and the last.
            for part in range(rank, LANES, RANKS):
                value = block * BLOCK + part * PART + tl.arange(0, PART)
                is_value = value < num_values
                total = tl.zeros([PART], tl.float32)
                for other in tl.static_range(RANKS):
                    theirs = _words(tl.load(addresses_ptr + other) + copies, DTYPE)
                    total += tl.load(theirs + value, mask=is_value, other=0.0).to(tl.float32)
                tl.store(own_sums + value, total.to(DTYPE), mask=is_value)
        _meet(addresses_ptr, run, rank, most_looks, 1, RANKS, LANES, PROGRAMS)
        for block in range(program, num_blocks, PROGRAMS):
            for part in tl.static_range(LANES):
                value = block * BLOCK + part * PART + tl.arange(0, PART)
                is_value = value < num_values
                summed = _words(tl.load(addresses_ptr + part % RANKS) + sums, DTYPE)
                tl.store(x_ptr + value, tl.load(summed + value, mask=is_value), mask=is_value)
    tl.store(runs_ptr + program, run)
