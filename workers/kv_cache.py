"""What a rank remembers of requests: paged keys and values, recurrent states, and the page allocator of rank 0.

Legend: N packed rows, H = Hkv local key-value heads, d head width. A slot is one token's place in the pool; a page is
page_size consecutive slots. Page 0 is the null page: never allocated, so padding may point to it. A seat is a running
request's place in the pool of recurrent states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.config import EngineConfig
from workers.kernels.block_scaled import FLOAT8_CAPABILITY
from workers.kernels.select import Kernels
from workers.kernels.torch_delta import LayerStates

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
"""448; torch converts larger values to NaN."""


def kv_dtype(config: EngineConfig, kernels: Kernels, device: torch.device) -> torch.dtype:
    """Return the dtype of an engine's keys and values. Raises ValueError if the kernels cannot read it there."""
    if config.kv_cache_dtype == "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if kernels.NAME == "triton" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FLOAT8_CAPABILITY:
            raise ValueError(
                "kv_cache_dtype: Triton kernels read fp8 on GPUs of compute capability 8.9 or higher (Ada, Hopper and "
                "later), and this one has {}.{}; write auto, or kernels: torch".format(*capability)
            )
    return FP8


class KVPool:
    """Keys and values of all layers with attention, [L, slots, 2, Hkv, d]; `states` has what other layers remember.

    Latents are both at once: the pool of `num_parts` 1 is [L, slots, 1, 1, d].

    `dtype` may be FP8 (e4m3 with scale 1) for models of any dtype: `write` converts, and attention converts back to
    the dtype of the queries. A token's entry is rounded once, when it is written, so every later pass reads the same.

    A token's key and value are adjacent: the fused projection produces them so, and one gather fetches both. The pool
    is created and written in inference mode, because autograd's view tracking took 4 % of a small forward pass.
    """

    @torch.inference_mode()
    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        states: StatePool | None = None,
        num_parts: int = 2,
    ) -> None:
        self.states = states
        # Zeros, because a masked-out NaN in a value would still turn a weighted sum into NaN.
        self.data = torch.zeros(num_layers, num_slots, num_parts, kv_heads, head_dim, dtype=dtype, device=device)
        self._layers = tuple(self.data.unbind(0))
        # Bytes, because torch cannot copy 8-bit floats by index on a CPU.
        self._byte_layers = tuple(self.data.view(torch.uint8).unbind(0)) if dtype == FP8 else ()

    @property
    def num_slots(self) -> int:
        """Number of token slots per layer."""
        return self.data.shape[1]

    @staticmethod
    def bytes_per_slot(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, num_parts: int = 2) -> int:
        """Bytes per token on one rank."""
        return num_layers * num_parts * kv_heads * head_dim * dtype.itemsize

    def layer(self, index: int) -> Tensor:
        """Return a view of one layer's slots, [slots, 2, Hkv, d] or, of latents, [slots, 1, 1, d]."""
        return self._layers[index]

    def write(self, index: int, kv_N2Hd: Tensor, slots_N: Tensor) -> None:
        """Store row n's entry in physical slot slots_N[n] (int64) of one layer, clamped to what FP8 holds."""
        if not self._byte_layers:
            self._layers[index].index_copy_(0, slots_N, kv_N2Hd)
            return
        rounded_N2Hd = kv_N2Hd.clamp(-FP8_MAX, FP8_MAX).to(FP8)
        self._byte_layers[index].index_copy_(0, slots_N, rounded_N2Hd.view(torch.uint8))


class StatePool:
    """Recurrent states of all gated delta layers, by seat; a running request has one seat. One rank's heads.

    states [L, seats, H, d, v] float32, and inputs [L, seats, 3, C]: the last three rows before the convolution. Seat 0
    is the null seat: the state before the first token, which is zero and never written. Behind the seats of requests
    are those of `Checkpoints`. The stash [L, rows, C + 2 H] has the rows of a step's trees, until the next step folds
    those that were accepted. Only passes at start-up have more rows than there is room for.

    state_shape: (H, d, v). num_channels: C.
    """

    @torch.inference_mode()
    def __init__(
        self,
        num_layers: int,
        state_shape: tuple[int, int, int],
        num_channels: int,
        num_seats: int,
        num_tree_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, 1 + num_seats)
        self.states = torch.zeros(*shape, *state_shape, dtype=torch.float32, device=device)
        self.inputs = torch.zeros(*shape, 3, num_channels, dtype=dtype, device=device)
        stash_width = num_channels + 2 * state_shape[0]
        self._stash = torch.zeros(num_layers, num_tree_rows, stash_width, dtype=dtype, device=device)

    def layer(self, index: int) -> LayerStates:
        """Return views of one layer."""
        return LayerStates(self.states[index], self.inputs[index], self._stash[index])


class Checkpoints:
    """Recurrent states behind cached pages, each in a seat of its own. Owned by rank 0.

    A state has the key of the last page before it. The least recently used one makes room for another, unless the step
    that is being built uses it.
    """

    def __init__(self, seats: Iterable[int]) -> None:
        self._free = list(seats)
        self._seat_of: dict[bytes, int] = {}  # least recently used first
        self._used: set[bytes] = set()  # in the step that is being built

    def __contains__(self, key: bytes) -> bool:
        return key in self._seat_of

    def use(self, key: bytes) -> int:
        """Return the seat of a state that this step reads."""
        self._used.add(key)
        self._seat_of[key] = seat = self._seat_of.pop(key)
        return seat

    def keep(self, key: bytes) -> int | None:
        """Return a seat for a state that this step computes; None if it has one, or this step uses all of them."""
        if key in self._seat_of:
            self.use(key)
            return None
        if not self._free:
            unused = next((key for key in self._seat_of if key not in self._used), None)
            if unused is None:
                return None
            self._free.append(self._seat_of.pop(unused))
        self._seat_of[key] = self._free.pop()
        return self.use(key)

    def end_step(self) -> None:
        """Allow every state to make room again: the step is built, and ranks run steps in order."""
        self._used.clear()


class OutOfPages(RuntimeError):
    """There are fewer free pages than requested; nothing was allocated."""


class PrefixMatch(NamedTuple):
    """Published pages that hold a prefix of some tokens."""

    pages: list[int]
    num_held: int  # pages that are in use; the others count as free until they are shared


NO_MATCH = PrefixMatch([], 0)


class PageAllocator:
    """Reference counts of pages 1 .. num_pages - 1, owned by rank 0.

    A page with final content may be published under a key that identifies the content; then other requests may share
    it. When its last holder frees it, it stays cached until its memory is needed. The longest idle page is evicted
    first; of pages freed together the last one, because a page can only be found together with those before it. A page
    is drafted if the drafter's pool also holds its tokens. Unused pages are allocated in ascending order, then freed
    pages, last freed first.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1, "page 0 is the null page and must exist"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._num_holders = [0] * num_pages
        self._idle: dict[int, None] = {}  # published, without holders; longest idle first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._drafted: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of pages without holders, cached ones included."""
        return len(self._free) + len(self._idle)

    def num_holders(self, page: int) -> int:
        """Number of requests that hold the page."""
        return self._num_holders[page]

    def num_drafted(self, pages: Sequence[int]) -> int:
        """Number of leading pages whose tokens the drafter's pool holds."""
        return next((i for i, page in enumerate(pages) if page not in self._drafted), len(pages))

    def is_published(self, page: int) -> bool:
        """True if the page can be found by its key."""
        return page in self._key_of

    def alloc(self, count: int) -> list[int]:
        """Allocate `count` pages, all or none, for one holder to write. Raises OutOfPages."""
        if count > self.num_free:
            raise OutOfPages(f"{count} KV pages requested, {self.num_free} of {self.num_pages - 1} free")
        while len(self._free) < count:
            self._unpublish(next(iter(self._idle)))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Release one holder's pages, given in token order. Freeing a page that is not held is a bug."""
        for page in reversed(pages):
            assert 0 < page < self.num_pages and self._num_holders[page], f"page {page} is not allocated"
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def find(self, keys: Sequence[bytes], *, is_drafted: bool) -> PrefixMatch:
        """Return the pages published under the leading keys, up to the first that is missing (or not drafted)."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None or (is_drafted and page not in self._drafted):
                break
            pages.append(page)
        return PrefixMatch(pages, sum(self._num_holders[page] > 0 for page in pages))

    def share(self, pages: list[int]) -> None:
        """Add a holder to pages that `find` returned. They must not be written any more."""
        for page in pages:
            assert page in self._key_of, f"page {page} is not published"
            self._idle.pop(page, None)
            self._num_holders[page] += 1

    def publish(self, page: int, key: bytes, *, is_drafted: bool) -> None:
        """Declare that a held page has the final content named by `key`.

        Of two pages with the same content, the first is kept unless only the second is drafted.
        """
        assert self._num_holders[page], f"page {page} is not allocated"
        known = self._page_of.setdefault(key, page)
        if known != page:
            if not is_drafted or known in self._drafted:
                return
            self._unpublish(known)
            self._page_of[key] = page
        self._key_of[page] = key
        if is_drafted:
            self._drafted.add(page)

    def forget_drafter(self) -> None:
        """Mark every page as undrafted, because a new drafter's pool is empty."""
        self._drafted.clear()

    def _unpublish(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        self._drafted.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)
