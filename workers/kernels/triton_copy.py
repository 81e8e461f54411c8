"""Path compaction in Triton: moves tokens between KV slots of all layers in one launch.

Sources and targets may overlap, so all reads must come before any write. Each program owns a few words of *every*
moving token in one layer: it loads them all into registers, synchronizes its threads, and stores them. Tokens are moved
as 64- or 32-bit words of any content.

Legend: L layers, C tokens that move, W words of a token's keys and values in one layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS_IN_REGISTERS = 8192
"""Words per program: 32 for each of its 256 threads."""
_FEWEST_TOKENS = 32
"""Up to this number of tokens one compiled kernel is used; above, each power of 2 has its own."""


def copy_slots(pool: Tensor, source_C: Tensor, target_C: Tensor) -> None:
    """See `workers.kernels.select.Kernels.copy_slots`."""
    assert pool.is_contiguous() and source_C.is_contiguous() and target_C.is_contiguous()
    num_layers, num_slots = pool.shape[:2]
    num_tokens = len(source_C)
    if not num_tokens:
        return
    num_bytes = pool[0, 0].numel() * pool.element_size()
    assert num_bytes % 4 == 0, "a token's keys and values must fill whole words, so head widths must be even"
    words = pool.view(num_layers, num_slots, -1).view(torch.int32 if num_bytes % 8 else torch.int64)
    num_words = words.shape[2]
    tokens = max(_FEWEST_TOKENS, triton.next_power_of_2(num_tokens))
    block = max(1, min(triton.next_power_of_2(num_words), _WORDS_IN_REGISTERS // tokens))
    _copy[(num_layers, triton.cdiv(num_words, block))](
        words, source_C, target_C, num_tokens, num_words, words.stride(0), TOKENS=tokens, BLOCK=block, num_warps=8
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _copy(
    words_ptr, source_ptr, target_ptr, num_tokens, num_words, layer_stride, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.arange(0, TOKENS)
    is_token = token < num_tokens
    source = tl.load(source_ptr + token, mask=is_token, other=0)
    target = tl.load(target_ptr + token, mask=is_token, other=0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = words_ptr + tl.program_id(0).to(tl.int64) * layer_stride + word[None, :]
    is_own = is_token[:, None] & (word < num_words)[None, :]
    moving = tl.load(own + source[:, None] * num_words, mask=is_own)
    tl.debug_barrier()  # no thread of the program stores before all have loaded
    tl.store(own + target[:, None] * num_words, moving, mask=is_own)
