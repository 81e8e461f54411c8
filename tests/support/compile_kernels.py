"""Compiles every Triton kernel without a GPU and reports what it takes of one. Run by `test_kernels.py`.

    python -m tests.support.compile_kernels [--archs 80 86 90] [--only attend] [--json | --quiet]

Triton must not be interpreted in this process. Shapes are those of common models. An argument that is 1 at run time
may be a constant to the compiler, so the narrowest cases are compiled too. Pointers are aligned and strides even, as
they are at run time: only then are loads of keys and values vectors, and staged in shared memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from drafter.tree import triton_growth
from workers.kernels import (
    triton_attention,
    triton_copy,
    triton_delta,
    triton_linear,
    triton_sampling,
    triton_truncation,
)

SHARED_BYTES = {arch: kib * 1024 for arch, kib in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()}
"""The limit per program by compute capability."""
INT64, FLOAT, FP8 = "*i64", "*fp32", "*fp8e4nv"
_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel and its arguments.

    types: of the arguments that are not 32-bit integers. aligned: numbers that are multiples of 16, beside the strides.
    least_arch: the lowest compute capability for which Triton compiles it.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    num_warps: int = 4
    num_stages: int = 2
    least_arch: int = 80
    aligned: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a compiled kernel takes. Registers and stack (spilled registers) are per thread, shared memory per program.

    loops: machine instructions of each loop of more than 99, in the order of the code.
    """

    name: str
    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: int
    loops: list[int]


def compile_case(case: Case, arch: int) -> Any:
    """Compile one kernel for a compute capability of 10 x major + minor; return what Triton made."""
    kernel, constants, names = case.kernel, dict(case.constants), case.kernel.arg_names
    if kernel is triton_attention._attend:
        pairs, width, item = constants["PAIRS"], constants["PADDED_WIDTH"], 4 if case.types["q_ptr"] == FLOAT else 2
        constants["KEYS"] = triton_attention.keys_of_block(pairs, width, item, SHARED_BYTES[arch])
    signature = {name: "constexpr" if name in constants else case.types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if name.endswith(("_ptr", "_stride", *case.aligned)) and name not in constants]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES[arch], case
    return compiled


def resources(case: Case, arch: int) -> Resources:
    """Compile one kernel and look at its machine code."""
    compiled = compile_case(case, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _run(_TOOL, "-res-usage", file.name)
        code = _run(_TOOL, "-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    instructions = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)
    return Resources(
        name=case.name,
        arch=arch,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=compiled.metadata.shared,
        instructions=sum(text.strip() != "NOP" for _, text in instructions),
        loops=[length for length in _loops(instructions) if length > 99],
    )


def _loops(instructions: list[tuple[str, str]]) -> Iterator[int]:
    """Yield the length of each loop: from the target of a branch backwards up to the branch."""
    for place, text in instructions:
        if jump := re.search(r"\bBRA(?:\.\w+)* (?:\S+, )?0x([0-9a-f]+)", text):
            length = (int(place, 16) - int(jump[1], 16)) // 16 + 1
            if length > 1:
                yield length


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def attention(name: str, dtype: str, width: int, *, pairs: int, kv_dtype: str | None = None, **constants: Any) -> Case:
    """Return a case of the attention kernel, launched as `tree_attention` does."""
    padded = max(16, triton.next_power_of_2(width))
    return Case(
        name=f"attend: {name}",
        kernel=triton_attention._attend,
        constants=dict(KV_HEADS=8, GROUP=4, WIDTH=width, PADDED_WIDTH=padded, PAGE=16, PAIRS=pairs)
        | dict(HAS_PATHS=False, HAS_SOFTCAP=False, HAS_SINKS=False, UPCAST=False)
        | constants,
        types=dict(q_ptr=dtype, kv_ptr=kv_dtype or dtype, out_ptr=dtype, part_ptr=FLOAT, lse_ptr=FLOAT, sink_ptr=dtype)
        | dict(scale="fp32", softcap="fp32")
        | dict.fromkeys(("pieces_ptr", "visible_ptr", "lows_ptr", "ancestors_ptr"), INT64)
        | dict(table_ptr="*i32", nodes_ptr="*u8"),
        num_warps=triton_attention.warps_of_tile(pairs),
        least_arch=80 if kv_dtype is None else 89,  # below, there is no conversion from e4m3
    )


def cases() -> Iterator[Case]:
    """Yield a case for each kernel and each kind of its shapes."""
    yield attention("a tree or a prompt, bf16, 128", "*bf16", 128, pairs=128)
    yield attention("plain decoding, bf16, 128", "*bf16", 128, pairs=16)
    yield attention("plain decoding, bf16, 128, odd", "*bf16", 128, pairs=16, q_head_stride=1)
    for width in (128, 256):
        yield attention(f"paths, bf16, {width}", "*bf16", width, pairs=64, HAS_PATHS=True)
    yield attention("fp16, 80", "*fp16", 80, pairs=128)
    yield attention("bf16, 256", "*bf16", 256, pairs=128)
    yield attention("bf16, 256, softcap, sinks", "*bf16", 256, pairs=128, HAS_SOFTCAP=True, HAS_SINKS=True)
    yield attention("71 heads a group, bf16, 64", "*bf16", 64, pairs=128, GROUP=71, KV_HEADS=1)
    for name, pairs in (("a tree or a prompt", 128), ("plain decoding", 16)):
        yield attention(f"{name}, bf16, 128, fp8 KV", "*bf16", 128, pairs=pairs, kv_dtype=FP8)
    yield attention("fp16, 80, fp8 KV", "*fp16", 80, pairs=128, kv_dtype=FP8)
    yield attention("bf16, 256, fp8 KV", "*bf16", 256, pairs=128, kv_dtype=FP8)
    yield attention("fp32, 128, fp8 KV", "*fp32", 128, pairs=16, kv_dtype=FP8)
    for width in (64, 128, 256):
        yield attention(f"fp32, {width}", "*fp32", width, pairs=16)
    for rows in (1, 32):
        yield Case(
            name=f"combine, {rows} rows each",
            kernel=triton_attention._combine,
            constants=dict(KV_HEADS=8, GROUP=4, WIDTH=128, PADDED_WIDTH=128, ROWS=rows, PIECES=32),
            types=dict(part_ptr=FLOAT, lse_ptr=FLOAT, out_ptr="*bf16", pieces_ptr=INT64, first_pieces_ptr=INT64),
        )
    for tokens, block in ((32, 256), (512, 16)):
        yield Case(
            name=f"copy {tokens} tokens",
            kernel=triton_copy._copy,
            constants=dict(TOKENS=tokens, BLOCK=block),
            types=dict(words_ptr=INT64, source_ptr=INT64, target_ptr=INT64, layer_stride="i64"),
            num_warps=8,
        )
    rows = dict(
        logits_ptr=FLOAT, temperature_ptr=FLOAT, floor_ptr=FLOAT, scores_ptr=FLOAT, score_ptr=FLOAT, out_ptr=FLOAT
    )
    rows |= dict(seed_ptr=INT64, index_ptr=INT64, ids_ptr=INT64, id_ptr=INT64)
    narrow = dict(BLOCK=1024, num_columns=1, row_stride=1, start=1)
    yield Case(name="draw", kernel=triton_sampling._draw, constants=dict(BLOCK=1024), types=rows)
    yield Case(name="draw, one column", kernel=triton_sampling._draw, constants=narrow, types=rows)
    yield Case(name="gumbel", kernel=triton_sampling._fill, constants=dict(BLOCK=1024), types=rows)
    yield Case(name="choose", kernel=triton_sampling._choose, constants=dict(SPLITS=512), types=rows, num_warps=1)
    top = dict(x_ptr=FLOAT, tau_ptr=FLOAT, values_ptr=FLOAT, value_ptr=FLOAT, lse_ptr=FLOAT, lses_ptr=FLOAT)
    top |= dict(indices_ptr=INT64, index_ptr=INT64)
    yield Case(name="top of block", kernel=triton_sampling._top_of_block, constants=dict(BLOCK=2048), types=top)
    for found, splits in ((512, 64), (1, 1)):
        constants = dict(FOUND=found, SPLITS=splits)
        yield Case(
            name=f"top of row, {splits} blocks", kernel=triton_sampling._top_of_row, constants=constants, types=top
        )
    yield from deltas()
    yield from cuts()
    yield from products()


def deltas() -> Iterator[Case]:
    """Yield the kernels of gated delta nets, with the heads of Qwen3.5-27B."""
    delta = triton_delta
    sizes = dict(HEADS=48, KEY_HEADS=16, KEY_WIDTH=128, VALUE_WIDTH=128, BLOCK=delta.BLOCK)
    rows = dict(x_ptr="*bf16", ba_ptr="*bf16", inputs_ptr="*bf16", stash_ptr="*bf16", source_ptr="*i32", scale="fp32")
    rows |= dict(path_ptr=INT64, rows_ptr="*i32", conv_ptr=FLOAT, decay_ptr=FLOAT, bias_ptr=FLOAT, mixed_ptr=FLOAT)
    rows |= dict(beta_ptr=FLOAT, total_ptr="*fp64", state_ptr=FLOAT, out_ptr=FLOAT)
    for is_fold in (False, True):
        name = "a fold" if is_fold else "a step"
        own = sizes | dict(IS_FOLD=is_fold)
        yield Case(
            name=f"delta: prepare {name}",
            kernel=delta._prepare,
            constants=own | dict(PADDED_WIDTH=128),
            types=rows,
            num_warps=1,
        )
        yield Case(
            name=f"delta: advance {name}",
            kernel=delta._advance,
            constants=own | dict(COLUMNS=32, PART=32, PARTS=4, INPUTS=64),
            types=rows,
            num_stages=1,
        )


def cuts() -> Iterator[Case]:
    """Yield the kernels that find the threshold of top-k and top-p, for 128,256 and for 152,064 columns."""
    cut = triton_truncation
    types = dict(x_ptr=FLOAT, top_k_ptr="*i32", top_p_ptr=FLOAT, maxima_ptr=FLOAT, sums_ptr=FLOAT, largest_ptr=FLOAT)
    types |= dict(total_ptr=FLOAT, bound_ptr="*i32", count_ptr="*i32", lists_ptr=FLOAT, threshold_ptr=FLOAT)
    groups = cut._BLOCK // cut._GROUP
    yield Case(
        name="cut: groups",
        kernel=cut._groups,
        constants=dict(GROUP=cut._GROUP, BLOCK=cut._BLOCK),
        types=types,
    )
    for found in (4096, 8192):
        yield Case(
            name=f"cut: bound among {found} groups",
            kernel=cut._bound,
            constants=dict(GROUP=cut._GROUP, GROUPS=groups, FOUND=found),
            types=types,
            num_warps=cut._warps(found),
        )
    yield Case(
        name="cut: list",
        kernel=cut._list,
        constants=dict(GROUPS=groups, BLOCK=cut._BLOCK, LISTED=cut._LISTED),
        types=types,
    )
    yield Case(
        name="cut: search",
        kernel=cut._search,
        constants=dict(LISTED=cut._LISTED, BLOCK=cut._ROW_BLOCK),
        types=types,
        num_warps=cut._warps(cut._LISTED),
    )


def products() -> Iterator[Case]:
    """Yield the products with weights in 4, 8 and 16 bits; a device of capability 8.0 has no float8."""
    types = dict(x_ptr="*bf16", bias_ptr="*bf16")
    float8 = dict(weight_ptr="*fp8e4nv", scale_ptr=FLOAT, zero_ptr=FLOAT)
    integers = dict(scale_ptr="*bf16", zero_ptr="*i16")
    tiles = [(tile, is_whole, False) for tile in triton_linear.TILES for is_whole in (True, False)]
    kinds = (
        ("float8", float8),
        ("int8", integers | {"weight_ptr": "*i8"}),
        ("4 bits", integers | {"weight_ptr": "*u8"}),
        ("bf16", dict(weight_ptr="*bf16", scale_ptr="*bf16", zero_ptr="*bf16")),
    )
    for (kind, own), (tile, is_whole, is_in_turn) in product(kinds, (*tiles, (triton_linear.TILES[-1], True, True))):
        is_split = tile is not triton_linear.TILES[-1]
        odd, turn = "" if is_whole else ", odd columns", ", splits in turn" * is_in_turn
        yield Case(
            name=f"multiply {kind}: {tile.rows} rows{odd}{turn}",
            kernel=triton_linear._multiply,
            constants=dict(ROWS=tile.rows, OUTPUTS=tile.outputs, TILES_PER_BLOCK=1, IS_WHOLE=is_whole)
            | dict(PARTS=1 if kind == "bf16" else tile.num_warps)
            | dict(COLUMNS=triton_linear._UNSCALED_COLUMNS if kind == "bf16" else 128)
            | dict(IS_IN_TURN=is_in_turn, HAS_BIAS=not is_split, IS_INTERPRETED=False, IS_PACKED=kind == "4 bits")
            | dict(HAS_SCALE=kind != "bf16", HAS_ZERO=kind in ("int8", "4 bits")),
            types=types | own | dict(out_ptr=FLOAT if is_split else "*bf16"),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            least_arch=89 if kind == "float8" else 80,
            aligned=("num_outputs", "num_inputs"),
        )
    for kind, own in kinds[:-1]:
        yield Case(
            name=f"dequantize {kind}",
            kernel=triton_linear._dequantize,
            constants=dict(OUTPUTS=triton_linear._DEQUANTIZED, COLUMNS=128, TILES_PER_BLOCK=1)
            | dict(IS_PACKED=kind == "4 bits", HAS_ZERO=kind != "float8", IS_INTERPRETED=False),
            types=own | dict(out_ptr="*bf16"),
            least_arch=89 if kind == "float8" else 80,
            aligned=("num_outputs", "num_inputs"),
        )
    yield Case(
        name="multiply: add 4 splits",
        kernel=triton_linear._add_splits,
        constants=dict(SPLITS=4, BLOCK=1024, HAS_BIAS=True, IS_INTERPRETED=False),
        types=dict(partial_ptr=FLOAT, bias_ptr="*bf16", out_ptr="*bf16"),
    )


def growth() -> Iterator[Case]:
    """Yield the kernels that grow trees, for 16 nodes of 8 children in a vocabulary of 32,000."""
    double = "*fp64"
    edits = dict(logits_ptr=FLOAT, count_ptr=FLOAT, ancestors_ptr=INT64, node_column_ptr=INT64, table_ptr=double)
    yield Case(
        name="tree: penalize",
        kernel=triton_growth._penalize,
        constants=dict(HAS_PENALTIES=True, IS_FIRST=False, BLOCK=2048),
        types=edits | dict(out_ptr=FLOAT, maxima_ptr=FLOAT, top_k_ptr="*i32", top_p_ptr=FLOAT),
    )
    yield Case(
        name="tree: mask min-p",
        kernel=triton_growth._mask_min_p,
        constants=dict(BLOCK=2048, SPLITS=16),
        types=dict(x_ptr=FLOAT, maxima_ptr=FLOAT, table_ptr=double),
    )
    block = dict(
        logits_ptr=FLOAT, ids_ptr=INT64, depth_ptr=INT64, table_ptr=double, values_ptr=FLOAT, columns_ptr=INT64
    )
    block |= dict(floor_ptr=FLOAT)
    yield Case(
        name="tree: best of block",
        kernel=triton_growth._best_of_block,
        constants=dict(IS_PROCESSED=False, IS_FIRST=False, HAS_IDS=True, BLOCK=2048),
        types=block | dict(sums_ptr=FLOAT),
    )
    scores = dict(
        values_ptr=FLOAT, columns_ptr=INT64, sums_ptr=FLOAT, table_ptr=double, log_odds_ptr=FLOAT, ids_ptr=INT64
    )
    scores |= dict(depth_ptr=INT64, weight_ptr=FLOAT, path_prob_ptr=double, children_ptr=INT64)
    yield Case(
        name="tree: score children",
        kernel=triton_growth._score_children,
        constants=dict(IS_FIRST=False, HAS_IDS=True, FOUND=128, SPLITS=16),
        types=scores | dict(child_weight_ptr=FLOAT, child_path_prob_ptr=double),
    )
    best = dict(children_ptr=INT64, table_ptr=double)
    best |= dict(child_weight_ptr=FLOAT, child_path_prob_ptr=double, state_ptr=INT64, weight_ptr=FLOAT)
    best |= dict(path_prob_ptr=double, rows_ptr=INT64, new_row_ptr=INT64)
    for is_first, candidates in ((False, 256), (True, 32)):
        yield Case(
            name=f"tree: keep best{' of the first level' if is_first else ''}",
            kernel=triton_growth._keep_best,
            constants=dict(IS_FIRST=is_first, HAS_LEAF_SIBLINGS=is_first, ROWS=32, CANDIDATES=candidates, CHUNK=16),
            types=best,
        )
    yield Case(
        name="tree: gather features",
        kernel=triton_growth._gather_features,
        constants=dict(BLOCK=1024),
        types=dict(roots_ptr="*bf16", hidden_ptr="*bf16", parent_ptr=INT64, out_ptr="*bf16"),
    )


def placement() -> Iterator[Case]:
    """Yield the kernel of static trees, for the service's defaults and for 63 nodes."""
    double = "*fp64"
    level = dict(children_ptr=INT64, child_weight_ptr=FLOAT, child_path_prob_ptr=double)
    level |= dict(table_ptr=double, shape_ptr=INT64, state_ptr=INT64, weight_ptr=FLOAT)
    level |= dict(path_prob_ptr=double, rows_ptr=INT64)
    for rows, is_first in product((32, 64), (False, True)):
        of_first = " of the first level" if is_first else ""
        yield Case(
            name=f"tree: place static{of_first}, {rows} rows",
            kernel=triton_growth._place_static,
            constants=dict(IS_FIRST=is_first, ROWS=rows),
            types=level,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", type=int, nargs="+", default=[90], choices=list(SHARED_BYTES))
    parser.add_argument("--only", default="", help="kernels whose names begin so")
    parser.add_argument("--json", action="store_true", help="one JSON list of rows")
    parser.add_argument("--quiet", action="store_true", help="only compile")
    options = parser.parse_args()
    rows = []
    for case in (*cases(), *growth(), *placement()):
        for arch in (arch for arch in options.archs if arch >= case.least_arch and case.name.startswith(options.only)):
            if options.quiet:
                compile_case(case, arch)
                continue
            rows.append(asdict(resources(case, arch)))
            if not options.json:
                print(*rows[-1].values(), sep="  ", flush=True)
    if options.json:
        print(json.dumps({"triton": triton.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
