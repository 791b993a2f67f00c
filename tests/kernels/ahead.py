"""Compile Triton kernels for a GPU that need not be present, and read what the compiler made of them."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch
import triton
from torch._inductor.runtime import triton_heuristics
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from mla_compile.int4 import PACKED
from mla_compile.kernels._common import combine as combining
from mla_compile.kernels._common.kernel import attend_latents
from mla_compile.kernels._common.launch import LEAST_TILES, Source, constants_of, mask_kind
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.parts import combination, shared_out
from mla_compile.kernels._common.tiles import Tiles, choose
from mla_compile.kernels.append_latents.kernel import append
from mla_compile.kernels.append_latents.triton import constants_of as append_constants
from mla_compile.kernels.backward.kernel import add_to_keys, add_to_queries
from mla_compile.kernels.backward.tiles import choose as choose_backward
from mla_compile.kernels.backward.triton import constants_of as backward_constants
from mla_compile.kernels.expanded_attention.kernel import attend_chunk
from mla_compile.kernels.expanded_attention.tiles import choose as choose_chunk
from mla_compile.kernels.expanded_attention.triton import Lengths
from mla_compile.kernels.expanded_attention.triton import constants_of as chunk_constants
from mla_compile.kernels.merge_states.kernel import merge
from mla_compile.kernels.merge_states.triton import constants_of as merge_constants
from mla_compile.kernels.paged_expanded_attention.kernel import gather_chunk
from mla_compile.kernels.paged_expanded_attention.triton import WARPS
from mla_compile.kernels.paged_expanded_attention.triton import constants_of as gather_constants
from mla_compile.kernels.paged_latent_attention import tensor_memory, warp_groups
from mla_compile.kernels.paged_latent_attention.clusters import boxes_in
from mla_compile.kernels.pages import Pages

from .recorded import Launch

SPILLED = (40, 2) if version("triton") < "3.9" else (0, 0)
"""The most bytes of stack, and of accesses to it in the loop over keys, of a kernel whose keys are shared out over
programs: Triton before 3.9 spills some numbers about the sequences, of which the loop of sm_100 reads up to two."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8"}


@dataclass(frozen=True)
class Record:
    """What the compiler made of a kernel."""

    shared: int
    """Bytes of shared memory."""
    registers: int
    stack: int
    """Bytes of stack (on AMD, of scratch memory) per thread: what is spilled from registers."""
    assembly: str
    """PTX, or AMD's assembly."""
    loop: Counter[str]
    """The number of each machine instruction in the loop over keys, by its name up to the first dot; NVIDIA only."""
    whole: Counter[str]
    """The same for the whole kernel."""

    @property
    def spills_in_loop(self) -> int:
        """The number of accesses to the stack in the loop over keys."""
        return self.loop["LDL"] + self.loop["STL"]


WIDE = ("queries", "tokens")
"""What Inductor passes as int64 to a kernel where no upper bound of it is known."""


def machine_of(arch: str) -> Machine:
    """A machine of an architecture, with 132 multiprocessors, as an H100 has."""
    return Machine(arch, 132)


def compile_attention(
    arch: str,
    heads: int,
    dtype: torch.dtype = torch.bfloat16,
    work: str = "shared",
    coded: torch.dtype | None = None,
    kind: str = "pages",
    page_size: int = 64,
    mask: torch.dtype | None = None,
    by_row: bool = False,
    starts: bool = False,
    rank: int = 512,
    rope: int = 64,
    tiles: Tiles | None = None,
    wide: bool = False,
) -> Record:
    """Compile the kernel of a decode step in DeepSeek's sizes, with the given tiles or those of the table.

    With `wide`, numbers that have no known upper bound are int64, as Inductor passes them.
    """
    machine = machine_of(arch)
    q = torch.empty(1, 1, heads, rank, dtype=dtype, device="meta")
    columns, groups = (rank // 2, rank // 32) if coded == PACKED else (rank, rank // 128)
    cache = torch.empty(1, page_size, columns, dtype=coded or dtype, device="meta")
    source = Source(
        kind=kind,
        latent=cache,
        rope=torch.empty(1, page_size, rope, dtype=dtype, device="meta"),
        tokens=4096,
        page_size=page_size,
        scales=torch.empty(1, page_size, groups, device="meta") if coded else None,
        mask=None if mask is None else torch.empty(1, heads if by_row else 1, 1, page_size, dtype=mask, device="meta"),
        causal=True,
        starts=torch.empty(1, dtype=torch.int32, device="meta") if starts else None,
    )
    tiles = tiles or choose(machine, heads, rank, rope, dtype.itemsize, coded is not None, mask_kind(source.mask))
    constants = constants_of(machine, q, rope, source, tiles, work)
    types = dict.fromkeys(attend_latents.arg_names, "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("q_latent", "q_rope", "latent", "rope", "o"), POINTERS[dtype])
    types |= dict.fromkeys(("scales", "lse", "acc", "m_out", "total_out"), "*fp32")
    types |= dict.fromkeys(("table", "lengths", "starts"), "*i32")
    types["mask"] = {None: "*u8", torch.bool: "*i1"}.get(mask, "*fp32")
    types |= dict.fromkeys(WIDE, "i64") if wide else {}
    if coded:
        types["latent"] = "*i8" if coded == torch.int8 else "*u8"
    aligned = [name for name in types if types[name].startswith("*")]
    aligned += [name for name in types if re.fullmatch(r"(q|qr|latent|rope)_stride_\w", name)]
    return _compile(arch, attend_latents, types, constants, aligned, tiles.warps, tiles.stages)


def compile_combination(
    arch: str, shared: bool = True, rank: int = 512, starts: bool = False, wide: bool = False, batch: int = 64
) -> Record:
    """Compile the kernel that merges the parts of a decode step in bfloat16; `wide` as for the step."""
    kernel = combining.combine
    types = dict.fromkeys(kernel.arg_names, "i32") | {"o": "*bf16", "lse": "*fp32"}
    types |= dict.fromkeys(("lengths", "starts"), "*i32")
    types |= dict.fromkeys(("acc", "m_in", "total_in"), "*fp32")
    types |= dict.fromkeys(WIDE, "i64") if wide else {}
    constants = {"SOURCE": "pages", "CAUSAL": True, "STARTS": starts, "SHARED": shared, "L": rank}
    processors = machine_of(arch).processors
    constants |= {
        "KEYS": 32,
        "LEAST": LEAST_TILES,
        "LENGTHS": 32,
        "FOLLOWS": False,
        **combination(shared_out(batch, 128, 2, processors, 3), 128, rank, processors),
    }
    aligned = [name for name in types if types[name].startswith("*")]
    return _compile(arch, kernel, types, constants, aligned, 4, 1)


def compile_chunk(
    arch: str,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    state: bool = True,
    mask: torch.dtype | None = None,
    widths: tuple[int, int, int] = (128, 64, 128),
    lengths: bool = False,
) -> Record:
    """Compile the kernel that a prefill launches for each chunk, with the table's tiles; `widths` are `P, R, V`.

    With `lengths`, each sequence has a length and a number of queries of its own.
    """
    tiles = choose_chunk(machine_of(arch), *widths, dtype.itemsize, mask is not None)
    given = None if mask is None else torch.empty(1, 1, 1, 1, dtype=mask, device="meta")
    numbers = Lengths(*[torch.empty(1, dtype=torch.int32, device="meta")] * 3) if lengths else None
    constants = chunk_constants(widths, given, numbers, causal, state, tiles)
    types = dict.fromkeys(attend_chunk.arg_names, "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("lengths", "starts", "counts"), "*i32" if lengths else "*fp32")
    types |= dict.fromkeys(("q", "k", "rope", "v", "o"), POINTERS[dtype])
    types |= dict.fromkeys(("lse", "acc", "m_state", "total_state"), "*fp32")
    types["mask"] = {None: "*u8", torch.bool: "*i1"}.get(mask, "*fp32")
    aligned = [name for name in types if types[name].startswith("*")]
    aligned += [name for name in types if re.fullmatch(r"(q|k|v|rope|o)_stride_\w", name)]
    return _compile(arch, attend_chunk, types, constants, aligned, tiles.warps, tiles.stages)


def compile_backward(
    arch: str,
    of: str,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    mask: torch.dtype | None = None,
    widths: tuple[int, int, int] = (128, 64, 128),
    tiles: Tiles | None = None,
) -> Record:
    """Compile one kernel of the backward, that of `queries` or of `keys`, with the given tiles or the table's."""
    kernel = add_to_queries if of == "queries" else add_to_keys
    tiles = tiles or getattr(choose_backward(machine_of(arch), *widths, dtype.itemsize, mask is not None), f"to_{of}")
    given = None if mask is None else torch.empty(1, 1, 1, 1, dtype=mask, device="meta")
    constants = backward_constants(widths, given, causal, tiles) | ({"D_LSE": False} if of == "queries" else {})
    types = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32"}
    types |= dict.fromkeys({"q", "k", "rope", "v", "o", "do", "dq", "dk", "dv", "d_rope"} & set(types), POINTERS[dtype])
    rows = ("lse", "d_lse", "delta_in", "delta_out", "peak_in", "peak_out", "shift_in", "shift_out")
    types |= dict.fromkeys(set(rows) & set(types), "*fp32")
    types["mask"] = {None: "*u8", torch.bool: "*i1"}.get(mask, "*fp32")
    aligned = [name for name in types if types[name].startswith("*")]
    aligned += [name for name in types if re.fullmatch(r"(q|rope|o|do|dq)_stride_\w", name)]
    return _compile(arch, kernel, types, constants, aligned, tiles.warps, tiles.stages)


def compile_gather(arch: str, fp8: bool, rank: int = 512, rope: int = 64, page_size: int = 64) -> Record:
    """Compile the kernel that gathers a chunk of latents from their pages, in bfloat16 or FP8."""
    row = torch.empty(1, page_size, rank + rope, dtype=torch.bfloat16, device="meta")
    scales = torch.empty(1, page_size, rank // 128, device="meta") if fp8 else None
    number = torch.empty(1, dtype=torch.int32, device="meta")
    constants = gather_constants(machine_of(arch), Pages(row[..., :rank], row[..., rank:], number, number, scales))
    types = dict.fromkeys(gather_chunk.arg_names, "i32") | dict.fromkeys(("table", "stops"), "*i32")
    types |= dict.fromkeys(("latent", "rope", "latent_out", "rope_out"), "*bf16") | {"scales": "*fp32"}
    if fp8:
        types["latent"] = "*u8"
    aligned = [name for name in types if types[name].startswith("*")]
    aligned += [name for name in types if re.fullmatch(r"(latent|rope)_stride_\w", name)]
    return _compile(arch, gather_chunk, types, constants, aligned, WARPS, 1)


def compile_append(arch: str, one_scale: bool, rank: int = 512, rope: int = 64) -> Record:
    """Compile the kernel that quantises tokens in bfloat16 into an FP8 cache."""
    types = dict.fromkeys(append.arg_names, "i32") | dict.fromkeys(("latent", "rope"), "*bf16")
    types |= {"slots": "*i64", "numbers": "*u8", "scales": "*fp32", "scale": "*fp32"}
    types |= {"rope_out": "*u8" if one_scale else "*bf16"}
    constants = append_constants(rank, rope, 1 if one_scale else rank // 128, one_scale)
    return _compile(arch, append, types, constants, [], 1, 1)


def compile_merge(arch: str, columns: int = 512) -> Record:
    """Compile the kernel that merges the results of two attentions in bfloat16."""
    types = dict.fromkeys(merge.arg_names, "i32") | dict.fromkeys(("o_a", "o_b", "o"), "*bf16")
    types |= dict.fromkeys(("lse_a", "lse_b", "lse"), "*fp32")
    aligned = [name for name in types if types[name].startswith("*")]
    return _compile(arch, merge, types, merge_constants(columns), aligned, 4, 1)


def compile_specialised(arch: str, causal: bool = False, index: str = "*i32", blocks: int = 1) -> Record:
    """Compile the warp-specialised decode kernel (Gluon) in bfloat16, for sm_90 or sm_100.

    On sm_90 each program has so many thread blocks.
    """
    kernel = (warp_groups if arch == "sm_90" else tensor_memory).attend_pages
    types = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32", "pieces": "*i32"}
    types |= dict.fromkeys(("q_latent", "q_rope", "o"), "*bf16")
    types |= dict.fromkeys(("lse", "acc", "m_out", "total_out"), "*fp32") | dict.fromkeys(("table", "lengths"), index)
    for name, width in (("latents", warp_groups.HALF.value), ("rope_keys", warp_groups.ROPE.value)):
        types[name] = f"tensordesc<bf16[1, {warp_groups.TILE.value}, {width}],{boxes_in(blocks)!r}>"
    constants = {"CAUSAL": causal, "LATE": False, "table_stride_1": 1}
    if arch == "sm_90":
        constants["BLOCKS"] = blocks
    aligned = [name for name in types if types[name].startswith("*")]
    aligned += [name for name in types if re.fullmatch(r"(q|qr)_stride_\w", name)]
    return _compile(arch, kernel, types, constants, aligned, 4, None, GluonASTSource, blocks)


def compile_launch(arch: str, launch: Launch) -> Record:
    """Compile what a recorded launch would run, with the types, alignments and options that Triton derives for it."""
    target = _target(arch)
    backend = make_backend(target)
    kernel, given = launch.function, launch.constants
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = binder(*launch.arguments, **given)
    options = {name: value for name, value in given.items() if name not in kernel.arg_names}
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, options, bound, specialization, None)
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, constexprs, attributes)
    return _record(triton.compile(source, target=target, options=parsed.__dict__))


def compile_written(arch: str, source: str, file: Path) -> Record:
    """Compile a kernel that Inductor wrote, with the types and options in its source; Triton reads it from a file."""
    of = {}

    def kept(**options):
        return lambda kernel: of.update(options, kernel=kernel)

    with mock.patch.object(triton_heuristics, "user_autotune", kept):
        file.write_text(source)
        runpy.run_path(str(file))
    (options,) = of["configs"]
    meta = of["triton_meta"]
    source = ASTSource(of["kernel"], meta["signature"], meta["constants"], meta["configs"][0])
    options = {"num_warps": options["num_warps"], "num_stages": options["num_stages"], "enable_fp_fusion": True}
    return _record(triton.compile(source, target=_target(arch), options=options))


def _compile(arch, kernel, types, constants, aligned, warps, stages, language=ASTSource, blocks=1) -> Record:
    signature = types | dict.fromkeys(constants, "constexpr")
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in aligned}
    source = language(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_ctas": blocks, "enable_fp_fusion": True} | (
        {"num_stages": stages} if stages else {}
    )
    return _record(triton.compile(source, target=_target(arch), options=options))


def _target(arch: str) -> GPUTarget:
    return (
        GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    )


def _record(compiled) -> Record:
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        assembly = compiled.asm["amdgcn"]
        registers, stack = (int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in AMD_FIELDS)
        return Record(shared, registers, stack, assembly, Counter(), Counter())
    cubin = next(Path(path) for path in compiled.metadata_group.values() if path.endswith(".cubin"))
    usage, sass = (_cuobjdump(flag, cubin) for flag in ("--dump-resource-usage", "--dump-sass"))
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    code = _code(sass)
    return Record(shared, registers, stack, compiled.asm["ptx"], _loop(code), _counted(code))


AMD_FIELDS = ("vgpr_count", "private_segment_fixed_size")


def _cuobjdump(flag: str, cubin: Path) -> str:
    return subprocess.run([CUOBJDUMP, flag, cubin], capture_output=True, text=True, check=True).stdout


def _code(sass: str) -> list[tuple[int, str]]:
    """The addresses and instructions in a disassembly."""
    lines = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+ )?(.*?);", sass)
    return [(int(address, 16), text) for address, text in lines]


def _counted(code: list[tuple[int, str]]) -> Counter[str]:
    return Counter(re.split(r"[. ]", text)[0] for _, text in code)


def _loop(code: list[tuple[int, str]]) -> Counter[str]:
    """The instructions of the loop over keys: the longest of the innermost loops that contain a matrix product.

    A loop is what lies between the target of a backward branch and the branch. Behind the last exit, what waits for
    barriers comes back to where the wait was met.
    """
    loops: list[tuple[int, int]] = []
    end = max((address for address, text in code if text.startswith("EXIT")), default=0)
    for address, text in (each for each in code if each[0] < end):
        branch = re.search(r"\bBRA(?:\.\w+)* (?:!?\w+, )*`?\(?(?:\.L_x_\d+|0x([0-9a-f]+))", text)
        target = int(branch[1], 16) if branch and branch[1] else address
        if target < address and any("MMA" in line for place, line in code if target <= place <= address):
            loops.append((target, address))
    innermost = [
        (first, last)
        for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]
    first, last = max(innermost, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    return _counted([(place, line) for place, line in code if first <= place <= last])
