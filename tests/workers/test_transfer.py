"""Several arrays travel to a device in one copy, whatever their types and shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.simulated_cuda import simulated_cuda
from workers.settings import SamplingSettings
from workers.transfer import all_to_device, to_host
from workers.types import SamplingBatch

ARRAYS = [
    np.array([1, 0, 1], dtype=bool),
    np.array([-1, 2**31 - 1], dtype=np.int32),
    np.zeros(0, dtype=np.float32),
    np.array([[0.5, 1.5], [2.5, -3.5]]),
    np.array([-(2**63), 2**63 - 1]),
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
    np.array([7], dtype=np.uint8),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("arrays", [ARRAYS, ARRAYS[:1], []], ids=["many", "one", "none"])
def test_arrays_arrive_as_they_were_in_one_copy(device: str, arrays: list[np.ndarray]) -> None:
    with simulated_cuda() as cuda:
        arrived = all_to_device(arrays, device)
        assert cuda.num_calls == (device == "cuda" and bool(arrays)) and not cuda.waits
        assert [tensor.device.type for tensor in arrived] == [device] * len(arrays)
        for array, tensor in zip(arrays, arrived, strict=True):
            there = tensor.cpu().numpy()
            assert there.dtype == array.dtype and np.array_equal(there, array)


def test_sampling_parameters_travel_together() -> None:
    batch = SamplingBatch.stack([SamplingSettings(temperature=0.5, top_k=3, min_p=0.1, seed=2**63), SamplingSettings()])
    with simulated_cuda() as cuda:
        moved = batch.to("cuda")
        assert cuda.num_calls == 1
        for name in ("temperature_B", "top_k_B", "top_p_B", "min_p_B", "seed_B"):
            [there] = to_host(getattr(moved, name))
            assert torch.equal(torch.from_numpy(there), getattr(batch, name))
