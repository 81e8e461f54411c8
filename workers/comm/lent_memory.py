"""Bytes between two processes of one device: the sender lends device memory, from which the receiver copies them.

Through host memory they would be copied five times, at a tenth of a link's speed: to the host, into the socket and out
of it, to where the driver reads, and to the device. NCCL refuses two ranks on one device.
"""

from __future__ import annotations

import json
import logging

import numpy as np
import torch
from torch import Tensor

from workers.comm.host_link import HostLink
from workers.pulse import PULSE

logger = logging.getLogger(__name__)

_LEAST_BYTES = 16 << 20
_NOT_LENT = -1
_TAKEN, _REFUSED = 1, 0


class LentMemory:
    """Moves a device's tensors between the processes at the ends of a host link, over which each tells when it may.

    Each tensor begins with the length of the name under which the receiver opens the memory, 0 = as before, and that
    name. The receiver answers when it has copied: so neither the memory nor a stream is ever waited for on the device,
    where a process that dies would be waited for forever. Where memory cannot be lent, bytes take the host link.
    """

    def __init__(self, host: HostLink, where: torch.device) -> None:
        self._host, self._where = host, where
        self._lent = self._borrowed = torch.empty(0, dtype=torch.uint8, device=where)
        self._may_lend = True

    def put(self, tensor: Tensor) -> None:
        """Send the bytes of a contiguous uint8 tensor on the device, and wait until the receiver has copied them."""
        name = self._reserve(len(tensor))
        if self._may_lend:
            self._lent[: len(tensor)].copy_(tensor)
            self._finish()
            self._host.put(torch.tensor([len(name)]).view(torch.uint8))
            if name:
                self._host.put(torch.frombuffer(bytearray(name), dtype=torch.uint8))
            if self._answer() == _TAKEN:
                return
            self._stop_lending("its process cannot open this one's")
        else:
            self._host.put(torch.tensor([_NOT_LENT]).view(torch.uint8))
        with PULSE.on_device():
            on_host = tensor.cpu()
        self._host.put(on_host)

    def take(self, tensor: Tensor) -> None:
        """Receive into a contiguous uint8 tensor on the device."""
        length = torch.empty(1, dtype=torch.int64)
        self._host.take(length.view(torch.uint8))
        num_bytes = int(length)
        if num_bytes != _NOT_LENT:
            if num_bytes == 0 or self._open(num_bytes):
                tensor.copy_(self._borrowed[: len(tensor)])
                self._finish()
                self._host.put(torch.tensor([_TAKEN], dtype=torch.uint8))
                return
            self._host.put(torch.tensor([_REFUSED], dtype=torch.uint8))
        on_host = torch.empty(len(tensor), dtype=torch.uint8)
        self._host.take(on_host)
        tensor.copy_(on_host, non_blocking=True)

    def _reserve(self, num_bytes: int) -> bytes:
        """Lend as many bytes, and return the name of the memory unless the receiver has it already."""
        if not self._may_lend or num_bytes <= len(self._lent):
            return b""
        try:
            self._lent, name = lend(max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()), self._where)
        except RuntimeError as error:
            self._stop_lending(str(error))
            return b""
        return name.encode()

    def _stop_lending(self, why: str) -> None:
        logger.warning("features take host memory, because the drafter cannot be lent the device's: %s", why)
        self._lent, self._may_lend = self._lent[:0].clone(), False

    def _open(self, num_bytes: int) -> bool:
        name = np.empty(num_bytes, dtype=np.uint8)
        self._host.take(torch.from_numpy(name))
        try:
            self._borrowed = borrow(name.tobytes().decode(), self._where)
        except RuntimeError as error:
            logger.warning("the verifier's device memory cannot be opened: %s", error)
            return False
        return True

    def _answer(self) -> int:
        answer = torch.empty(1, dtype=torch.uint8)
        self._host.take(answer)
        return int(answer)

    def _finish(self) -> None:
        with PULSE.on_device():
            torch.cuda.current_stream(self._where).synchronize()


def lend(num_bytes: int, where: torch.device) -> tuple[Tensor, str]:
    """Allocate device memory that another process can open by its name. Raises RuntimeError where there is no way."""
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=where)
    parts = memory.untyped_storage()._share_cuda_()
    return memory, json.dumps([part.hex() if isinstance(part, bytes) else part for part in parts])


def borrow(name: str, where: torch.device) -> Tensor:
    """Open another process's device memory. Raises RuntimeError if that fails. It stays until neither end holds it."""
    _, handle, size, offset, counter, counter_offset, event, has_event = json.loads(name)
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        where.index, bytes.fromhex(handle), size, offset,
        bytes.fromhex(counter), counter_offset, bytes.fromhex(event), has_event,
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage)
