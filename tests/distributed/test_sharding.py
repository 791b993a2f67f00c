"""The ops on DTensors: sharded by sequences or heads, they give shards of what the op gives for whole tensors."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import mla_compile
import mla_compile.backend
from mla_compile import ops
from mla_compile.asked import kept_to
from mla_compile.fp8 import quantised
from mla_compile.parallel import sharding
from tests.distributed import naive
from tests.distributed.processes import in_processes

B, S, T, N, L, P, R, V, PAGE = 4, 2, 12, 6, 16, 8, 4, 6, 4


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


QUERY = {"q_latent": normal(B, S, N, L), "q_rope": normal(B, S, N, R)}
KEYS = {"latent": normal(B, T, L), "k_rope": normal(B, T, R)}
PAGES = {
    "latent_pages": normal(20, PAGE, L),
    "rope_pages": normal(20, PAGE, R),
    "block_table": torch.randperm(20, generator=torch.Generator().manual_seed(0))[: B * 3].view(B, 3),
    "seq_lens": torch.tensor([12, 3, 7, 9]),
}
WEIGHTS = {"w_uk": normal(N, P, L), "w_uv": normal(N, V, L)}
INDICES = torch.randint(-1, T, (B, S, 5), generator=torch.Generator().manual_seed(0))
CAUSAL = {"mask": None, "causal_offset": T - S, "scale": 0.3}
EXPANDED = {"q": normal(B, S, N, P + R), **KEYS, **WEIGHTS}
GIVEN = {
    "latent_attention": {**QUERY, **KEYS, **CAUSAL},
    "sparse_latent_attention": {**QUERY, **KEYS, "indices": INDICES, **CAUSAL, "uniform_when_empty": True},
    "paged_latent_attention": {**QUERY, **PAGES, "causal": True, "scale": 0.3},
    "expanded_attention": {**EXPANDED, **CAUSAL, "workspace_tokens": 8},
    "paged_expanded_attention": {
        "q": EXPANDED["q"],
        **PAGES,
        **WEIGHTS,
        "causal": True,
        "scale": 0.3,
        "workspace_tokens": 8,
        "query_lens": torch.tensor([2, 1, 2, 0]),
    },
    "merge_states": {
        "o_a": normal(B, S, N, L),
        "lse_a": normal(B, S, N, dtype=torch.float32),
        "o_b": normal(B, S, N, L, seed=1),
        "lse_b": normal(B, S, N, seed=1, dtype=torch.float32),
    },
    "per_head_matmul": {"x": normal(B, S, N, P), "weight": WEIGHTS["w_uk"]},
    "sealed_attention": {
        "query": normal(B, N, S, P),
        "key": normal(B, N, T, P),
        "value": normal(B, N, T, V),
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    },
}
"""The arguments of each op, by name; the query, or what takes its place, is the first."""

CASES = [
    *((op, given) for op, given in GIVEN.items()),
    ("latent_attention", GIVEN["latent_attention"] | {"mask": normal(B, 1, 1, T) > 0}),
    ("latent_attention", GIVEN["latent_attention"] | {"mask": normal(1, N, S, T), "causal_offset": None}),
    ("expanded_attention", GIVEN["expanded_attention"] | {"mask": normal(B, N, S, T)}),
    ("paged_latent_attention", GIVEN["paged_latent_attention"] | {"first_positions": torch.tensor([9, 0, 5, 2])}),
    ("sealed_attention", GIVEN["sealed_attention"] | {"attn_mask": normal(S, T) > 0}),
    (
        "sealed_attention",
        GIVEN["sealed_attention"] | {"key": normal(B, 2, T, P), "value": normal(B, 2, T, V), "enable_gqa": True},
    ),
    (
        "sealed_attention",
        GIVEN["sealed_attention"] | {"key": normal(B, 3, T, P), "value": normal(B, 3, T, V), "enable_gqa": True},
    ),
]
"""Also masks per sequence and per head, and groups of heads that two ranks can and cannot divide among them."""

TOLERANCE = 16 * torch.finfo(torch.float32).eps
"""Parts are merged by exponentials in float32, whose last bits depend on where a row begins; outputs are below 8."""


def listed(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def shared_out(mesh, op, given, axis):
    """The op's results for DTensors, sharded by an axis where they have it, and the number of messages."""
    axes = sharding.RULES[op].arguments if op in sharding.RULES else {}
    dim = {"B": 0, "N": 1 if op == "sealed_attention" else 2}.get(axis)
    placed = {}
    for i, (name, value) in enumerate(given.items()):
        if isinstance(value, torch.Tensor):
            of = axes[name].find(axis) if axis and name in axes and not axes[name].startswith("*") else -1
            if dim is not None and (i == 0 or op == "merge_states"):
                of = dim
            value = distribute_tensor(value, mesh, [Shard(of) if of >= 0 else Replicate()])
        placed[name] = value
    with CommDebugMode() as counted:
        results = listed(called(op, placed))
    return results, counted.get_total_counts()


def called(op, given):
    """Call an op with arguments by place, or by name where some arguments in between are left out."""
    names = [argument.name for argument in getattr(ops, op).default._schema.arguments][: len(given)]
    return getattr(ops, op)(*given.values()) if list(given) == names else getattr(ops, op)(**given)


def of_shares(cases):
    """For each case and each axis to shard by, the results, their placements, and the number of messages."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = []
    for op, given in cases:
        for axis in ("", "B", "N"):
            results, messages = shared_out(mesh, op, given, axis)
            found.append(([r.full_tensor() for r in results], [str(r.placements[0]) for r in results], messages))
    return found


def gradients(mask):
    """Gradients of attention sharded by sequences and by heads: of all operands, and of the latent alone."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = []
    for axis in ("B", "N"):
        leaves = []
        for name, value in {**EXPANDED, "mask": mask}.items():
            axes = sharding.RULES["expanded_attention"].arguments[name].lstrip("*")
            dim = axes.find(axis)
            placed = [Shard(dim) if dim >= 0 and value.shape[dim] > 1 else Replicate()]
            leaves.append(distribute_tensor(value, mesh, placed).requires_grad_())
        o, lse = ops.expanded_attention(*leaves, None, 0.3, 8)
        (o.sum() + lse.sum()).backward()
        found.append([leaf.grad.full_tensor() for leaf in leaves])
        only = leaves[1].detach().requires_grad_()
        operands = [only if leaf is leaves[1] else leaf.detach() for leaf in leaves]
        with kept_to("triton"):  # an argument of the backward
            o, _ = ops.expanded_attention(*operands, None, 0.3, 8)
        o.sum().backward()
        found[-1].append(only.grad.full_tensor())
    return found


def compiled():
    """Results and paths of naive attention to DTensors, sharded by sequences or heads, under the backend."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    q, kv_b, latent, k_rope = naive.make(0, 2, 4, 1, 24, torch.float32, heads=4)
    found = [naive.attend(q, latent, k_rope, kv_b)]
    for dims in ((0, 0, 0, None), (2, None, None, 0)):
        placed = [
            distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(dim)])
            for tensor, dim in zip((q, latent, k_rope, kv_b), dims, strict=True)
        ]
        torch._dynamo.reset()
        found.append(torch.compile(naive.attend, backend="mla", fullgraph=True)(*placed).full_tensor())
        found.append([site.path for site in mla_compile.last_report().sites])
    return found


def all_of_them(cases, masks):
    return of_shares(cases), [gradients(mask) for mask in masks], of_keys()


MASKS = [normal(B, N, S, T), normal(1, 1, S, T)]


@pytest.fixture(scope="module")
def found():
    """What the first of two ranks found; the other one's is the same."""
    first, second = in_processes(all_of_them, 2, CASES, MASKS)
    for one, other in zip(first[0], second[0], strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=0, equal_nan=True)
    return first


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{i} {op}" for i, (op, _) in enumerate(CASES)])
def test_shares_give_shares_of_the_whole(found, index):
    op, given = CASES[index]
    expected = listed(called(op, given))
    heads = 1 if op == "sealed_attention" else 2
    for axis, (results, placements, messages) in zip(("", "B", "N"), found[0][3 * index : 3 * index + 3], strict=True):
        cut = axis == "N" and op == "sealed_attention" and given["key"].shape[1] == 3
        dim = None if not axis or cut else {"B": 0, "N": heads}[axis]
        assert set(placements) == {"R" if dim is None else f"S({dim})"}
        assert (messages > 0) == cut  # three groups of heads: queries are gathered
        for one, whole in zip(results, expected, strict=True):
            torch.testing.assert_close(one, whole, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("index", range(len(MASKS)), ids=["a mask of all", "a mask for all"])
def test_gradients_are_those_of_the_whole(found, index):
    with torch.enable_grad():
        leaves = [tensor.clone().requires_grad_() for tensor in (*EXPANDED.values(), MASKS[index])]
        o, lse = ops.expanded_attention(*leaves, None, 0.3, 8)
        (only,) = torch.autograd.grad(o.sum(), [leaves[1]], retain_graph=True)
        expected = [*torch.autograd.grad(o.sum() + lse.sum(), leaves), only]
    for of_axis in found[1][index]:
        for one, whole in zip(of_axis, expected, strict=True):
            torch.testing.assert_close(one, whole)


def of_keys():
    """Attention to latents that are sharded by tokens, and to an FP8 cache that is sharded by sequences."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    o, _ = ops.latent_attention(
        *(
            distribute_tensor(value, mesh, [Shard(1) if name in KEYS else Replicate()])
            if isinstance(value, torch.Tensor)
            else value
            for name, value in GIVEN["latent_attention"].items()
        )
    )
    sparse, _ = ops.sparse_latent_attention(
        **{
            name: DTensor.from_local(value.chunk(2)[mesh.get_rank()], mesh, [Shard(0)])
            if isinstance(value, torch.Tensor)
            else value
            for name, value in in_fp8().items()
        }
    )
    return o.full_tensor(), sparse.full_tensor(), str(sparse.placements[0])


def in_fp8():
    """The arguments of sparse attention, with a cache in FP8."""
    numbers, scales = quantised(KEYS["latent"])
    return GIVEN["sparse_latent_attention"] | {"latent": numbers, "latent_scales": scales}


def test_keys_of_tokens_are_gathered_and_scales_shared_out_with_sequences(found):
    o, sparse, placed = found[2]
    torch.testing.assert_close(o, ops.latent_attention(*GIVEN["latent_attention"].values())[0])
    torch.testing.assert_close(sparse, ops.sparse_latent_attention(**in_fp8())[0])
    assert placed == "S(0)"


@pytest.mark.slow
def test_naive_attention_to_dtensors_is_rewritten():
    eager, *of_axes = in_processes(compiled, 2)[0]
    assert of_axes[1::2] == [["absorbed"], ["absorbed"]]
    for one in of_axes[::2]:
        torch.testing.assert_close(one, eager)


@pytest.mark.slow
def test_the_backend_can_be_imported_where_torch_lacks_a_function_for_sharding():
    code = "from torch.distributed.tensor._ops import utils; del utils.expand_to_full_mesh_op_strategy"
    code += "; import logging; logging.basicConfig(level=logging.INFO)"
    code += "; import sys, mla_compile.backend; assert 'mla_compile.parallel.sharding' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "no sharding rules: ImportError: " in run.stderr
