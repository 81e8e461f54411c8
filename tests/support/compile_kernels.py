"""Compiles every Triton kernel for an H100 or H200 without a GPU, and reports its resources. Run by `test_kernels.py`.

    python -m tests.support.compile_kernels

Triton must not be interpreted in this process. Shapes are those of common models. An argument that is 1 at run time
may be a constant to the compiler, so the narrowest cases are compiled too. Pointers are aligned and strides even, as
they are at run time: only then are loads of keys and values vectors, and staged in shared memory.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.kernels import triton_attention, triton_copy, triton_sampling, triton_truncation

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024  # limit per program on Hopper
INT64, FLOAT = "*i64", "*fp32"


def compile_kernel(kernel: Any, constants: dict[str, Any], types: dict[str, str], num_warps: int = 4) -> None:
    """Compile one kernel. types: of the arguments that are not 32-bit integers."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if name.endswith(("_ptr", "_stride")) and name not in constants]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attrs)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": num_warps, "num_stages": 2})
    assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED_BYTES
    print(f"{kernel.__name__:15} {compiled.metadata.shared / 1024:6.1f} KiB shared  {constants}")


def attention(dtype: str, width: int, *, pairs: int, keys: int, is_split: bool, **constants: int) -> None:
    padded = max(16, triton.next_power_of_2(width))
    out = FLOAT if is_split else dtype
    compile_kernel(
        triton_attention._attend,
        dict(KV_HEADS=8, GROUP=4, WIDTH=width, PADDED_WIDTH=padded, PAGE=16, PAIRS=pairs, KEYS=keys, IS_SPLIT=is_split)
        | dict(HAS_SOFTCAP=False, HAS_SINKS=False, UPCAST=False)
        | constants,
        dict(q_ptr=dtype, kv_ptr=dtype, out_ptr=dtype, partial_ptr=out, lse_ptr=out, sink_ptr=dtype)
        | dict(scale="fp32", softcap="fp32")
        | dict.fromkeys(("tiles_ptr", "tile_lows_ptr", "table_ptr", "visible_ptr", "lows_ptr", "ancestors_ptr"), INT64),
    )


def main() -> None:
    attention("*bf16", 128, pairs=64, keys=64, is_split=True)
    attention("*bf16", 128, pairs=16, keys=64, is_split=False, q_head_stride=1)
    attention("*fp16", 80, pairs=64, keys=64, is_split=False)
    attention("*bf16", 256, pairs=64, keys=64, is_split=True)
    attention("*bf16", 256, pairs=64, keys=64, is_split=True, HAS_SOFTCAP=True, HAS_SINKS=True)
    attention("*fp32", 64, pairs=32, keys=64, is_split=True)
    attention("*fp32", 256, pairs=16, keys=32, is_split=False)
    compile_kernel(
        triton_attention._combine,
        dict(WIDTH=80, PADDED_WIDTH=128, SPLITS=8),
        dict(partial_ptr=FLOAT, lse_ptr=FLOAT, out_ptr="*bf16"),
        num_warps=1,
    )
    for tokens, block in ((32, 256), (512, 16)):
        slots = dict(words_ptr=INT64, source_ptr=INT64, target_ptr=INT64, layer_stride="i64")
        compile_kernel(triton_copy._copy, dict(TOKENS=tokens, BLOCK=block), slots, num_warps=8)
    rows = dict(
        logits_ptr=FLOAT, temperature_ptr=FLOAT, floor_ptr=FLOAT, scores_ptr=FLOAT, score_ptr=FLOAT, out_ptr=FLOAT
    )
    rows |= dict(seed_ptr=INT64, index_ptr=INT64, ids_ptr=INT64, id_ptr=INT64)
    compile_kernel(triton_sampling._draw, dict(BLOCK=1024), rows)
    compile_kernel(triton_sampling._draw, dict(BLOCK=1024, num_columns=1, row_stride=1, start=1), rows)
    compile_kernel(triton_sampling._fill, dict(BLOCK=1024), rows)
    compile_kernel(triton_sampling._choose, dict(SPLITS=512), rows, num_warps=1)
    top = dict(x_ptr=FLOAT, tau_ptr=FLOAT, values_ptr=FLOAT, value_ptr=FLOAT, lse_ptr=FLOAT, lses_ptr=FLOAT)
    top |= dict(indices_ptr=INT64, index_ptr=INT64)
    compile_kernel(triton_sampling._top_of_block, dict(BLOCK=2048), top)
    compile_kernel(triton_sampling._top_of_row, dict(FOUND=512, SPLITS=64), top)
    compile_kernel(triton_sampling._top_of_row, dict(FOUND=1, SPLITS=1), top)
    threshold = dict(x_ptr=FLOAT, top_k_ptr="*i32", top_p_ptr=FLOAT, lists_ptr=FLOAT, threshold_ptr=FLOAT)
    compile_kernel(
        triton_truncation._threshold,
        dict(LISTED=triton_truncation._LISTED, BLOCK=triton_truncation._BLOCK),
        threshold,
        num_warps=16,
    )


if __name__ == "__main__":
    main()
