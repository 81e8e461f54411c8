"""A simulated CUDA device in CPU memory, with real results and a real device's rules.

    with simulated_cuda() as cuda:
        torch.zeros(3, device="cuda")       .is_cuda; cannot be mixed with a CPU tensor
        torch.cuda.CUDAGraph(), ...         records operations and replays them on the same memory
        cuda.waits                          the places where the host waited for the device, in order
        cuda.untold                         those where it did so without telling the rank's pulse
        cuda.graphs                         the captured graphs, with the number of their replays
        cuda.num_calls                      launches and copies outside of graphs so far, a replay being one
        cuda.num_bytes_sent                 bytes copied to the device so far
        cuda.grids                          the kernels launched and their numbers of programs, in order
        cuda.memory.num_bytes, .most_bytes  of the tensors that live on the device, now and at most
        cuda.hang()                         makes replays end nothing, and whoever waits for the device wait forever

It does not simulate speed, races or the kernels' arithmetic. It fails where a GPU fails:

- an operation on tensors of both devices, or a CPU tensor as argument of a Triton kernel;
- during capture: reading a value on the host, copying from the host, a shape that depends on values;
- a replay that does not see the new inputs, because a value was captured or a tensor has moved;
- reading memory before it is written: `torch.empty` holds NaN, or indices that are out of range;
- reading a copy to the host before it has finished.

Operations are intercepted where torch dispatches them and run on the tensors' memory. `kernel_twins` replaces Triton's
launches.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.kernel_twins import TWINS
from workers.comm import lent_memory
from workers.pulse import PULSE

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_ROOT = Path(__file__).parents[2]
_NOBODY = {"simulated_cuda.py", "transfer.py"}
"""Files in which a wait is attributed to the caller."""
_LOOKS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_consecutive"}
"""Operations that synchronize, because the host needs their result or its shape."""
_SOMETIMES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "repeat_interleave": lambda named: isinstance(named.get("repeats"), Tensor) and named.get("output_size") is None,
    "_grouped_mm": lambda named: named["self"].dtype != torch.bfloat16,
}
_MOVES = {"to", "_to_copy", "copy_"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

_ONLY_THERE: dict[str, Callable[..., Any]] = {
    "aten.histc.default": lambda x, *args, **kwargs: torch.histc(x.float(), *args, **kwargs).to(x.dtype),
    "aten.mm.dtype": lambda x, y, dtype: x.to(dtype) @ y.to(dtype),
}
"""Operations that CUDA supports for these types and a CPU does not."""


class DeviceMemory:
    """Counts the bytes of all tensors that live on the device; views share theirs.

    What is captured counts only while it is: the caching allocator reuses a graph's memory in the same way.
    """

    def __init__(self) -> None:
        self.num_bytes = self.most_bytes = 0
        self._num_users: Counter[int] = Counter()

    def reset(self) -> int:
        """Forget what was held at most until now, and return what is held."""
        self.most_bytes = self.num_bytes
        return self.num_bytes

    def hold(self, tensor: OnDevice) -> None:
        """Count a new tensor, until it is collected."""
        storage = tensor.memory.untyped_storage()
        if not self._num_users[storage._cdata]:
            self.num_bytes += storage.nbytes()
            self.most_bytes = max(self.most_bytes, self.num_bytes)
        self._num_users[storage._cdata] += 1
        weakref.finalize(tensor, self._release, storage._cdata, storage.nbytes()).atexit = False

    def _release(self, storage: int, num_bytes: int) -> None:
        self._num_users[storage] -= 1
        if not self._num_users[storage]:
            self.num_bytes -= num_bytes


_MEMORY = DeviceMemory()  # of the one device that there is


class OnDevice(Tensor):
    """A tensor on the device; `memory` holds its values."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> OnDevice:
        # torch sees it on the CPU, because for CUDA tensors it would query the driver.
        made = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), storage_offset=memory.storage_offset(), dtype=memory.dtype
        )
        made.memory = memory
        _MEMORY.hold(made)
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{operation} outside of simulated_cuda()")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.memory})"


@dataclass
class Graph:
    """torch.cuda.CUDAGraph: the operations recorded during its capture."""

    device: SimulatedCuda
    work: list[Callable[[], object]] = field(default_factory=list)
    num_replays: int = 0

    def replay(self) -> None:
        assert self.work, "nothing was captured, or the graph was reset"
        self.num_replays += 1
        if self.device.is_hung:
            return
        with _disable_current_modes(), torch.inference_mode():
            for again in self.work:
                again()

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def reset(self) -> None:
        self.work.clear()


class Stream:
    """torch.cuda.Stream: all operations run in launch order."""

    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...


class SimulatedCuda(TorchDispatchMode):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.untold: list[str] = []
        self.is_hung = False
        self.grids: list[tuple[str, int]] = []
        self.graphs: list[Graph] = []
        self.num_bytes_sent = 0
        self.memory = _MEMORY
        self._num_calls = 0
        self._captured: Graph | None = None

    @property
    def num_calls(self) -> int:
        """Number of launches, copies and replays that the host has made."""
        return self._num_calls + sum(graph.num_replays for graph in self.graphs)

    def wait(self, why: str) -> None:
        """Record that the host waits for the device."""
        if self._captured is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
        self.waits.append(_caller())
        if PULSE._frozen_s is None:
            self.untold.append(_caller())
        while self.is_hung:  # as the driver spins, while what was launched never ends
            pass

    def hang(self) -> None:
        """Stop the device, as a collective in a graph does whose peers do not come."""
        self.is_hung = True

    def launch(self, kernel: Callable[[], object]) -> None:
        """Run an operation on memory, now and in every replay."""
        kernel()
        if self._captured is not None:
            self._captured.work.append(kernel)
        else:
            self._num_calls += 1

    @contextmanager
    def capture(self, graph: Graph, pool: Any = None, **_: Any) -> Iterator[None]:
        """Replace torch.cuda.graph."""
        assert self._captured is None and not graph.work and pool in (None, graph.pool())
        self.graphs.append(graph)
        self._captured = graph
        try:
            yield
        finally:
            self._captured = None

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, operation._schema.name.removeprefix("aten::")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in given if isinstance(tensor, OnDevice)]
        named = dict(zip((argument.name for argument in operation._schema.arguments), args, strict=False)) | kwargs
        device = torch.device(named.get("device") or (CUDA if here else CPU))
        if name in _MOVES and (here or device.type == "cuda"):
            return self._move(operation, name, args, kwargs, named)
        if not here and device.type != "cuda":
            return operation(*args, **kwargs)
        assert device.type == "cuda", f"{operation} of tensors on the device would make one on the CPU"
        self._check(operation, name, given, named)
        return self._run(operation, name, args, kwargs, here)

    def _check(self, operation: Any, name: str, given: list[Tensor], named: dict[str, Any]) -> None:
        strangers = [tensor for tensor in given if tensor.dim() > 0 and not isinstance(tensor, OnDevice)]
        if name in _INDEXED:
            indices = [index for index in named["indices"] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.wait("an index that is a mask")
            elif any(not isinstance(index, OnDevice) for index in indices):
                self.wait("an index on the CPU")
            strangers = [tensor for tensor in strangers if not any(tensor is index for index in indices)]
        if strangers:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {operation} got cuda:0 and cpu")
        if name in _LOOKS or (name in _SOMETIMES and _SOMETIMES[name](named)):
            self.wait(name)

    def _move(self, operation: Any, name: str, args: Any, kwargs: Any, named: dict[str, Any]) -> Any:
        if name == "copy_":
            source, target = named["src"], named["self"].device
        else:
            source, target = named["self"], torch.device(named.get("device") or named["self"].device)
            target = named["other"].device if "other" in named else target
        if source.device.type == target.type or (source.dim() == 0 and name == "copy_"):
            here = [tensor for tensor in args if isinstance(tensor, OnDevice)]
            return self._run(operation, name, args, kwargs, here)
        is_async = bool(named.get("non_blocking"))
        if target.type == "cpu":
            assert not is_async, "the host would read what has not arrived"
            self.wait("a copy to the host")
        elif self._captured is not None:
            raise RuntimeError("a graph would copy from the host's memory, where later something else is")
        elif not is_async:  # a copy without non_blocking synchronizes, although the driver stages the source
            self.wait("a copy to the device")
        self._num_calls += 1
        self.num_bytes_sent += source.nbytes * (target.type == "cuda")
        if name == "copy_":
            _memory(args[0]).copy_(_memory(source))
            return args[0]
        moved = operation(*_on_cpu(args), **_on_cpu(kwargs))
        moved = moved.clone() if _storage(moved) == _storage(_memory(source)) else moved
        return moved if target.type == "cpu" else OnDevice(moved)

    def _run(self, operation: Any, name: str, args: Any, kwargs: Any, here: list[OnDevice]) -> Any:
        arguments, options = _on_cpu(args), _on_cpu(kwargs)
        is_mutable = operation._schema.is_mutable or name.startswith("c10d::")  # whose schemas do not say so
        operation = _ONLY_THERE.get(str(operation), operation)
        result = operation(*arguments, **options)
        of_memory = {id(tensor.memory): tensor for tensor in here}
        known = {_storage(tensor.memory) for tensor in here}
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        new = [_storage(one) not in known for one in made]
        if name in _EMPTY:
            for one in made:
                _spoil(one)
        elif not any(new) and not is_mutable:  # a view
            pass
        elif self._captured is None:
            self._num_calls += 1
        else:

            def again() -> None:
                leaves = tree_leaves(operation(*arguments, **options))
                for one in leaves:
                    if hasattr(one, "wait"):  # a collective's work
                        one.wait()
                results = [one for one in leaves if isinstance(one, Tensor)]
                for place, value, is_new in zip(made, results, new, strict=True):
                    if is_new:
                        place.copy_(value)

            self._captured.work.append(again)

        def told(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            return of_memory[id(one)] if id(one) in of_memory else OnDevice(one)

        return tree_map(told, result)


@contextmanager
def simulated_cuda() -> Iterator[SimulatedCuda]:
    """Simulate a device in this thread only. Triton must be imported in interpreter mode (`conftest.py`)."""
    from triton.runtime.interpreter import GridExecutor

    cuda, tensor = SimulatedCuda(), torch.tensor

    def tensor_there(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = tensor(data, **options)
        return made if device is None else made.to(device)

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(one, Tensor) and not isinstance(one, OnDevice) for one in (*args, *kwargs.values())):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        arguments, options = _on_cpu(args), _on_cpu(kwargs)
        cuda.grids.append((executor.fn.__name__, math.prod(executor.grid)))
        cuda.launch(lambda: TWINS[executor.fn.__name__](*arguments, **options))

    def causal(*sizes: int) -> Tensor:
        with _disable_current_modes():  # torch makes this subclass of tensors in no mode
            return causal_lower_right(*sizes)

    patches = {
        "torch.tensor": tensor_there,
        "workers.kernels.prompt_attention.causal_lower_right": causal,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.set_device": lambda device: None,
        "torch.cuda.empty_cache": lambda: None,
        "torch.cuda.get_device_capability": lambda device=None: (9, 0),
        "torch.cuda.get_device_properties": lambda device=None: mock.Mock(uuid=os.environ.get("CUDA_VISIBLE_DEVICES")),
        "torch.cuda.mem_get_info": lambda device=None: (60 << 30, 80 << 30),
        "torch.cuda.synchronize": lambda device=None: cuda.wait("torch.cuda.synchronize"),
        "torch.cuda.Stream": Stream,
        "torch.cuda.current_stream": lambda device=None: mock.Mock(synchronize=lambda: cuda.wait("synchronize")),
        "torch.cuda.stream": lambda stream: nullcontext(),
        "torch.cuda.CUDAGraph": type("CUDAGraph", (Graph,), {"__init__": lambda graph: Graph.__init__(graph, cuda)}),
        "torch.cuda.graph": cuda.capture,
        f"{lent_memory.__name__}.lend": _lend,
        f"{lent_memory.__name__}.borrow": _borrow,
    }
    # The functions that a device as a context changes. torch lists them once: before one of them is replaced.
    _device_constructors()
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", launched))
        # With autograd, torch decomposes operations first and creates intermediate tensors on the CPU.
        stack.enter_context(torch.inference_mode())
        stack.enter_context(cuda)
        yield cuda


def _lend(num_bytes: int, where: torch.device) -> tuple[Tensor, str]:
    """Stand for memory that another process on the device can open: it is a file's."""
    descriptor, name = tempfile.mkstemp()
    os.close(descriptor)
    return _mapped(name, num_bytes), name


def _borrow(name: str, where: torch.device) -> Tensor:
    borrowed = _mapped(name, os.path.getsize(name))
    os.unlink(name)
    return borrowed


def _mapped(name: str, num_bytes: int) -> Tensor:
    with _disable_current_modes():
        return OnDevice(torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8))


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, OnDevice) else value


def _on_cpu(arguments: Any) -> Any:
    """Replace device tensors in the arguments with their memory."""
    return tree_map(lambda one: CPU if isinstance(one, torch.device) else _memory(one), arguments)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _spoil(memory: Tensor) -> None:
    """Fill new memory with stale content: NaN, or integers that are no token, page or row of a small engine."""
    memory.fill_(float("nan") if memory.is_floating_point() else memory.dtype == torch.bool or 113)


def _caller() -> str:
    """Return the code that waits, for example "verifier.target._draw"."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and ".venv" not in path.parts and path.name not in _NOBODY:
            return ".".join([*path.relative_to(_ROOT).with_suffix("").parts, frame.f_code.co_name])
    return "?"
