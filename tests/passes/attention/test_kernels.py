"""A call of an attention library's kernel stays unchanged; the report says what to call instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from mla_compile.passes.attention.kernels import is_kernel
from tests.passes.graphs import capture, rewrite

N, P, L, TOKENS = 3, 4, 6, 5
FLASH_ATTENTION_2 = (
    "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, int window_size_left, "
    "int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor)"
)
FLASH_ATTENTION_3 = (
    "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor(out!)? out=None, "
    "Tensor? cu_seqlens_q=None, float? softmax_scale=None, bool is_causal=False) -> Tensor"
)
REASON = "expected attention that is written in torch operations, found a call of an attention kernel, at `"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """A library whose ops have the schemas of flash-attn's, and compute SDPA."""
    with torch.library._scoped_library("mla_tests_flash", "DEF") as library:

        def attend(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
            return F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=True).transpose(
                0, 1
            )

        def attend_with_lse(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            return attend(q, *rest).contiguous(), q.new_zeros(q.shape[:2])

        for name, schema, function in (
            ("two", FLASH_ATTENTION_2, attend_with_lse),
            ("three", FLASH_ATTENTION_3, lambda *args, **kw: attend(*args, **kw).contiguous()),
        ):
            library.define(name + schema)
            library.impl(name, function, "CompositeExplicitAutograd")
            torch.library.register_fake(f"mla_tests_flash::{name}", function, lib=library)
        yield library


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(q: Tensor, latent: Tensor, weight: Tensor, attend: Attend) -> Tensor:
    """Queries `[tokens, N, P]`, latents `[tokens, L]`, and one weight for keys and values `[L, N 2 P]`."""
    return attend(q, *(latent @ weight).view(-1, N, 2 * P).split(P, -1))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(TOKENS, N, P), torch.randn(TOKENS, L), torch.randn(L, N * 2 * P)


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.mla_tests_flash.two(q, k, v, 0.0, P**-0.5, True, -1, -1, 0.0, None, False)[0]


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    return torch.ops.mla_tests_flash.three(q, k, v, out=out) + 0


@pytest.mark.usefixtures("library", "without_codegen")
@pytest.mark.parametrize(("attend", "grad"), [(flash_attention_2, True), (flash_attention_3, False)])
def test_flash_attention_is_left_and_the_reason_says_what_to_call(attend: Attend, grad: bool) -> None:
    q, latent, weight = inputs()
    latent.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        o = torch.compile(naive, backend="mla")(q, latent, weight, attend)
    (site,) = mla_compile.last_report().sites
    assert (site.path, site.reason.startswith(REASON)) == ("unchanged", True)
    assert "call scaled_dot_product_attention" in site.remedy
    torch.testing.assert_close(o, naive(q, latent, weight, attend))


def test_an_op_of_packed_sequences_with_other_parameters_is_another() -> None:
    with torch.library._scoped_library("flash_attn", "DEF") as library:
        library.define(
            "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q) -> (Tensor, Tensor)"
        )
        torch.library.register_fake(
            "flash_attn::_flash_attn_varlen_forward", lambda q, *_: (torch.empty_like(q), q.new_empty(0)), lib=library
        )
        op, starts = torch.ops.flash_attn._flash_attn_varlen_forward, torch.tensor([0, TOKENS])

        def attention(q: Tensor, latent: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
            return naive(q, latent, weight, lambda *qkv: op(*qkv, starts)[0])

        module = capture(attention, *inputs(), starts)
        (outcome,) = rewrite(module)
    assert outcome.reason.startswith(REASON)


def test_attention_that_projects_its_operands_itself_is_no_kernel_of_attention() -> None:
    def attention(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch._native_multi_head_attention(x, x, x, 8, 2, w, b, w[:8], b[:8], need_weights=False)[0]

    module = capture(attention, torch.randn(1, 3, 8), torch.randn(24, 8), torch.randn(24))
    assert "_native_multi_head_attention" in module.code
    assert not any(map(is_kernel, module.graph.nodes))
