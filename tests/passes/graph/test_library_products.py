"""Products with weights in few bits, as ops of libraries compute them, are absorbed; those of other layers stay."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_compile
from mla_compile.passes.graph import packed_weights
from mla_compile.passes.graph.library_products import LibraryProduct, may_be_library_product
from mla_compile.passes.graph.packed_weights import int4_pack, nf4_pack
from tests.passes.graphs import capture, rewrite

B, SQ, T, N, L, P, R, V, HIDDEN = 2, 2, 200, 4, 64, 32, 16, 32, 64
GROUP = 32
Quantised = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
"""A function of latents and the tensors of a weight, and these tensors."""


@pytest.fixture(autouse=True, scope="module")
def libraries() -> None:
    """The libraries, or ops with the schemas and the numbers of theirs where they are not installed."""
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes  # noqa: F401
    elif not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        _define_bitsandbytes()
    if importlib.util.find_spec("optimum.quanto") if importlib.util.find_spec("optimum") else False:
        import optimum.quanto  # noqa: F401
    elif not hasattr(torch.ops.quanto, "qbytes_mm"):
        torch.library.define("quanto::qbytes_mm", "(Tensor A, Tensor B, Tensor scales) -> Tensor")
        torch.library.impl("quanto::qbytes_mm", "CPU")(lambda a, b, s: a.to(s.dtype) @ (s * b.to(s.dtype)).T)
        torch.library.register_fake("quanto::qbytes_mm")(lambda a, b, s: s.new_empty(*a.shape[:-1], b.shape[0]))


def _define_bitsandbytes() -> None:
    coded = "Tensor absmax, int blocksize, str quant_type"
    torch.library.define(
        "bitsandbytes::gemm_4bit",
        f"(Tensor A, Tensor B, int[] shapeB, {coded}, Tensor? bias=None, Tensor? absmax_8bit=None, "
        "Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
    )
    torch.library.define(
        "bitsandbytes::dequantize_4bit", f"(Tensor A, {coded}, int[] shape, ScalarType dtype) -> Tensor"
    )
    torch.library.define(
        "bitsandbytes::dequantize_blockwise",
        "(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor",
    )

    def of_scales(a: Tensor, absmax: Tensor, code: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
        return (code[a.long()] * absmax.repeat_interleave(blocksize)[: a.numel()]).to(dtype)

    def dequantized(a: Tensor, absmax: Tensor, blocksize: int, _: str, shape: list[int], dtype: torch.dtype) -> Tensor:
        numbers = torch.linspace(-1, 1, 16)[torch.stack([a.flatten() >> 4, a.flatten() & 15], -1).long()]
        return (numbers.view(-1, blocksize) * absmax[:, None]).view(shape).to(dtype)

    def gemm(
        a: Tensor, b: Tensor, shape: list[int], absmax: Tensor, blocksize: int, kind: str, *more: Tensor
    ) -> Tensor:
        bias, codes, code, offset = (*more, None, None, None, None)[:4]
        if codes is not None:
            absmax = of_scales(codes, absmax, code, 256, torch.float32) + offset
        return torch.nn.functional.linear(a, dequantized(b, absmax, blocksize, kind, shape, a.dtype), bias)

    ops = {"gemm_4bit": gemm, "dequantize_4bit": dequantized, "dequantize_blockwise": of_scales}
    for name, op in ops.items():
        torch.library.impl(f"bitsandbytes::{name}", "CPU")(op)
    torch.library.register_fake("bitsandbytes::gemm_4bit")(lambda a, b, shape, *_: a.new_empty(*a.shape[:-1], shape[0]))
    torch.library.register_fake("bitsandbytes::dequantize_4bit")(
        lambda a, absmax, blocksize, kind, shape, dtype: absmax.new_empty(shape, dtype=dtype)
    )
    torch.library.register_fake("bitsandbytes::dequantize_blockwise")(
        lambda a, absmax, code, blocksize, dtype: torch.empty_like(a, dtype=dtype)
    )


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def codes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def in_4_bits(rows: int, columns: int) -> Quantised:
    def product(x: Tensor, b: Tensor, absmax: Tensor) -> Tensor:
        return torch.ops.bitsandbytes.gemm_4bit(x, b, [rows, columns], absmax, GROUP, "nf4")

    return product, (codes(rows * columns // 2, 1), drawn(rows * columns // GROUP).abs() / 4)


def in_4_bits_with_a_bias(rows: int, columns: int) -> Quantised:
    def product(x: Tensor, b: Tensor, absmax: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.bitsandbytes.gemm_4bit(x, b, [rows, columns], absmax, GROUP, "nf4", bias=bias)

    return product, (*in_4_bits(rows, columns)[1], drawn(rows))


def in_4_bits_twice(rows: int, columns: int) -> Quantised:
    """Scales that are codes of 8 bits themselves."""

    def product(x: Tensor, b: Tensor, absmax: Tensor, of_scales: Tensor, code: Tensor, offset: Tensor) -> Tensor:
        nested = {"absmax_8bit": of_scales, "absmax_code": code, "absmax_offset": offset}
        return torch.ops.bitsandbytes.gemm_4bit(x, b, [rows, columns], absmax, GROUP, "nf4", **nested)

    blocks = rows * columns // GROUP
    scales = drawn((blocks + 255) // 256).abs() / 8, codes(blocks), torch.linspace(-1, 1, 256), torch.tensor(0.2)
    return product, (in_4_bits(rows, columns)[1][0], *scales)


def in_bytes(rows: int, columns: int) -> Quantised:
    tensors = codes(rows, columns).view(torch.int8), drawn(rows, 1).abs() / 256
    return lambda x, b, scales: torch.ops.quanto.qbytes_mm(x, b, scales), tensors


def in_torchs_bytes(rows: int, columns: int) -> Quantised:
    def product(x: Tensor, b: Tensor, scales: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.flatten(0, -2), b, scales).unflatten(0, x.shape[:-1])

    return product, (codes(rows, columns).view(torch.int8), drawn(rows).abs() / 256)


def in_torchs_4_bits(rows: int, columns: int) -> Quantised:
    if packed_weights.block_of_int4_pack() is None:
        pytest.skip("torch packs weights of 4 bits in another way on this CPU")

    def product(x: Tensor, b: Tensor, numbers: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x.flatten(0, -2), b, GROUP, numbers).unflatten(0, x.shape[:-1])

    return product, (codes(rows, columns // 2), drawn(columns // GROUP, rows, 2) / 16)


QUANTISED = [in_4_bits, in_4_bits_with_a_bias, in_4_bits_twice, in_bytes, in_torchs_bytes, in_torchs_4_bits]


class Quantising(torch.nn.Module):
    """MLA whose projections are all quantised: of queries, to the keys and values, and of the output."""

    def __init__(self, quantised: Callable[[int, int], Quantised]) -> None:
        super().__init__()
        self.products = list[tuple[Callable[..., Tensor], list[str]]]()
        self.change: Callable[[Tensor], Tensor] = lambda kv: kv
        for i, shape in enumerate([(N * (P + R), HIDDEN), (N * (P + V), L), (HIDDEN, N * V)]):
            product, tensors = quantised(*shape)
            self.products.append((product, [f"weight_{i}_{j}" for j in range(len(tensors))]))
            for name, tensor in zip(self.products[-1][1], tensors, strict=True):
                self.register_buffer(name, tensor)

    def project(self, i: int, x: Tensor) -> Tensor:
        product, names = self.products[i]
        return product(x, *(getattr(self, name) for name in names))

    def forward(self, x: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        q = self.project(0, x).unflatten(-1, (N, P + R)).transpose(1, 2)
        nope, v = self.change(self.project(1, latent)).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
        k = torch.cat([nope, k_rope[:, None].expand(-1, N, -1, -1)], -1)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.project(2, o.transpose(1, 2).flatten(2))


def given(queries: int = SQ) -> tuple[Tensor, ...]:
    return drawn(B, queries, HIDDEN), drawn(B, T, L), drawn(B, T, R)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("quantised", QUANTISED, ids=lambda quantised: quantised.__name__)
def test_rewritten(quantised: Callable[[int, int], Quantised], path: str) -> None:
    module = Quantising(quantised)
    compiled = torch.compile(module, backend="mla", options={"mla.path": path, "mla.strict": True})
    torch.testing.assert_close(compiled(*given()), module(*given()), rtol=1e-4, atol=1e-4)
    assert [site.path for site in mla_compile.last_report().sites] == [path]


def traced(module: Quantising, change: Callable[[Tensor], Tensor] = lambda kv: kv) -> torch.fx.GraphModule:
    """The graph of a module, its weights among the inputs, with keys and values changed after they are projected."""
    names, weights = zip(*module.named_buffers(), strict=True)
    module.change = change
    inputs = given()

    def function(*tensors: Tensor) -> Tensor:
        called = dict(zip(names, tensors[len(inputs) :], strict=True))
        return torch.func.functional_call(module, called, tensors[: len(inputs)])

    return capture(function, *inputs, *weights)


def ops_of(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes]


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_other_layers_keep_their_ops(path: str) -> None:
    module = traced(Quantising(in_4_bits))
    assert [outcome.path for outcome in rewrite(module, path)] == [path]
    assert ops_of(module).count("bitsandbytes.gemm_4bit.default") == 2
    assert ops_of(module).count("bitsandbytes.dequantize_4bit.default") == 1


def unchanged(module: torch.fx.GraphModule) -> bool:
    code = module.code
    return not any(outcome.rewritten for outcome in rewrite(module)) and module.code == code


def test_what_is_not_mla_keeps_them_too() -> None:
    assert unchanged(traced(Quantising(in_4_bits), torch.tanh))


def test_latents_in_bytes_are_not_what_is_cached() -> None:
    """quanto's op multiplies integers by integers too, and rounds what is then no up-projection."""
    module = traced(Quantising(in_bytes))
    for node in module.graph.nodes:
        if str(node.target) == "quanto.qbytes_mm.default":
            node.args[0].meta["val"] = node.args[0].meta["val"].to(torch.int8)
    assert unchanged(module)


def test_scales_decide_the_dtype_of_the_product() -> None:
    product, (weight, scales) = in_bytes(N * (P + V), L)
    latent, half = drawn(B, T, L), scales.bfloat16()
    graph = capture(product, latent, weight, half).graph
    (node,) = [node for node in graph.nodes if may_be_library_product(node)]
    result = LibraryProduct(node)(latent, weight, half)
    assert result.dtype == node.meta["val"].dtype == torch.bfloat16
    expected = product(latent, weight, half)
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))


def test_a_layout_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Quantising(in_torchs_4_bits)
    monkeypatch.setattr(packed_weights, "block_of_int4_pack", lambda: None)
    assert unchanged(traced(module))


def test_int4_pack() -> None:
    product, (packed, numbers) = in_torchs_4_bits(128, 64)
    weight = int4_pack({"mat2": packed, "qGroupSize": GROUP, "qScaleAndZeros": numbers})
    torch.testing.assert_close(weight.T, product(torch.eye(64)[None], packed, numbers)[0], rtol=1e-6, atol=1e-6)


def test_nf4_pack() -> None:
    """As bitsandbytes packs for CPUs with AVX512-BF16: 32 rows a block, two columns in 32 bytes, low bits first."""
    rows, columns = 64, 128
    of = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(0))
    packed = torch.empty(rows // 32, columns // 2, 32, dtype=torch.uint8)
    for block, pair in itertools.product(range(rows // 32), range(columns // 2)):
        two = of[32 * block : 32 * block + 32, 2 * pair : 2 * pair + 2].flatten()
        packed[block, pair] = two[:32] + 16 * two[32:]
    code, absmax = drawn(16), drawn(columns // GROUP, rows)
    tensors = {"B": packed.view(rows, columns // 2), "absmax": absmax, "code": code}
    weight = nf4_pack({**tensors, "blocksize": GROUP, "shapeB": [rows, columns]})
    assert torch.equal(weight, code[of] * absmax.T.repeat_interleave(GROUP, 1))
