"""Paged key-value memory: the pool of one rank and the allocator that rank 0 keeps.

    KVPool(num_layers, num_slots, kv_heads, head_dim, dtype, device)
        .layer(i) -> [slots, 2, Hkv, d]   .write(i, kv_N2Hd, slots_N)   .copy(src_slots, dst_slots)
        KVPool.bytes_per_slot(num_layers, kv_heads, head_dim, dtype) -> int
    PageAllocator(num_pages)   .alloc(n) -> list[int]   .free(pages)   .num_free

Legend: N packed rows, H = Hkv local key-value heads, d head width. A slot is one token's place in the pool; a page is
page_size consecutive slots. Page 0 is the null page: never allocated, so padding may point to it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """Keys and values of all layers, [L, slots, 2, Hkv, d].

    Key and value of a token lie side by side: the fused projection yields them so, and one gather then fetches both.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        # Zeros, not empty: a masked-out NaN in a value would still spoil a weighted sum.
        self.data = torch.zeros(num_layers, num_slots, 2, kv_heads, head_dim, dtype=dtype, device=device)
        self._layers = tuple(self.data.unbind(0))

    @property
    def num_slots(self) -> int:
        return self.data.shape[1]

    @staticmethod
    def bytes_per_slot(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one token occupies on one rank."""
        return num_layers * 2 * kv_heads * head_dim * dtype.itemsize

    def layer(self, index: int) -> Tensor:
        """The slots of one layer, [slots, 2, Hkv, d]; a view."""
        return self._layers[index]

    def write(self, index: int, kv_N2Hd: Tensor, slots_N: Tensor) -> None:
        """Store row n's key and value in physical slot slots_N[n] (int64) of one layer."""
        self._layers[index].index_copy_(0, slots_N, kv_N2Hd)

    def copy(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Move tokens between physical slots (int64 [n] each) in every layer; all reads happen before any write.

        This is path compaction: an accepted tree path becomes consecutive slots, which may overlap the old ones.
        """
        self.data.index_copy_(1, dst_slots, self.data.index_select(1, src_slots))


class OutOfPages(RuntimeError):
    """Fewer free pages than asked for; nothing was allocated."""


class PageAllocator:
    """A free list over pages 1 .. num_pages - 1, owned by rank 0. Lowest unused page first, then last freed first."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1, "page 0 is the null page and must exist"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = [False] + [True] * (num_pages - 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """`count` pages, all or none. Raises OutOfPages."""
        if count > len(self._free):
            raise OutOfPages(f"{count} KV pages wanted, {len(self._free)} of {self.num_pages - 1} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back. Freeing a page twice, or page 0, is a bug of ours."""
        for page in pages:
            assert 0 < page < self.num_pages and not self._is_free[page], f"page {page} is not allocated"
            self._is_free[page] = True
            self._free.append(page)
