"""Packed sequences (`cu_seqlens`), by torch's op or by flash-attn's: each attends to its own keys, of any number."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from mla_compile.passes.outcome import Outcome
from tests import packed
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import HIDDEN, SCALE, Function, L, N, P, R

V = 4
"""Narrower than keys, so that values are padded."""
WINDOWS = {"causal": (-1, 0), "all keys": (-1, -1), "causal window": (2, 0), "window": (3, -1)}
BATCHES = {
    "decode": ([1, 1, 1], [6, 11, 3]),
    "prompts": ([5, 9, 2], [5, 9, 2]),
    "mixed": ([1, 7, 1, 30], [12, 7, 5, 41]),
    "empty": ([3, 0, 2, 4, 0], [3, 4, 0, 9, 0]),
    "more queries than keys": ([6, 2], [3, 1]),
    "one": ([4], [9]),
}
SYMBOLIC = [(0,), (0,), (0,), (), (), (0,), (0,)]
"""The symbolic dimensions of `tensors()`: tokens and sequences."""


def takes(option: str) -> Any:
    """Skip a test where torch's `varlen_attn` does not have this option."""
    there = option in inspect.signature(varlen_attn).parameters
    return pytest.mark.skipif(not there, reason=f"torch's varlen_attn takes no {option}")


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with packed.on_cpu():
        yield


def cu(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def tensors(queries: Sequence[int], keys: Sequence[int]) -> tuple[Tensor, ...]:
    """`x` [Tq, HIDDEN], `latent` [Tk, L], `k_rope` [Tk, R], `w_q`, `w_kv` as of the spellings, two `cu_seqlens`."""
    shapes = (sum(queries), HIDDEN), (sum(keys), L), (sum(keys), R), (HIDDEN, N * (P + R)), (L, N * (P + V))
    generator = torch.Generator().manual_seed(0)
    x, latent, k_rope, w_q, w_kv = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x, latent, k_rope, w_q / HIDDEN**0.5, w_kv / L**0.5, cu(queries), cu(keys)


def naive(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`q`, `k` and `v` [tokens, N, width]; values are padded with zeros to the width of keys."""
    k_nope, v = (latent @ w_kv).view(-1, N, P + V).split([P, V], -1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1)], -1)
    return (x @ w_q).view(-1, N, P + R), k, F.pad(v, (0, P + R - V))


def varlen(batch: Any, **options: Any) -> Function:
    most = [max(lengths) for lengths in batch]

    def attention(*args: Tensor) -> Tensor:
        return varlen_attn(*naive(*args[:5]), *args[5:7], *most, **options)[..., :V]

    return attention


def compiled(
    function: Function, inputs: Sequence[Tensor], symbolic: Sequence[Sequence[int]] = ()
) -> Iterator[tuple[str, fx.GraphModule, Outcome]]:
    """For each path, the graph after the passes, its results compared with those from before."""
    traced = capture(function, *inputs, symbolic=symbolic)
    before = run(traced, *inputs)
    for path in ("absorbed", "chunked"):
        module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
        (outcome,) = rewrite(module, path)
        check_right(before, run(module, *inputs))
        yield path, module, outcome


@pytest.mark.diagonal
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_both_paths_are_taken_and_right(batch: Any, window: tuple[int, int]) -> None:
    words = ["sequences", *(["causal"] if window[1] == 0 else []), *(["window"] if window[0] > 0 else [])]
    for path, module, outcome in compiled(varlen(batch, window_size=window), tensors(*batch)):
        assert (outcome.path, outcome.mask) == (path, " + ".join(words)), outcome.reason
        assert outcome.reason.endswith("reads each sequence's own keys")
        assert "_varlen_attn" not in module.code
        assert f"paged_{'latent' if path == 'absorbed' else 'expanded'}_attention" in module.code


@pytest.mark.parametrize("window", [(-1, 0), (3, -1)])
def test_a_graph_is_right_for_other_lengths(window: tuple[int, int]) -> None:
    batch = BATCHES["mixed"]
    function = varlen(([40], [60]), window_size=window)
    for _, module, _ in compiled(function, tensors(*batch), SYMBOLIC):
        for other in ([2, 40], [60, 40]), ([1] * 7, [*range(2, 9)]), ([33, 0, 3], [35, 2, 1]):
            inputs = tensors(*other)
            check_right(function(*inputs), run(module, *inputs))


@pytest.mark.parametrize("most", [1, 3, 128])
def test_blocks_of_any_size_are_right(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_compile.passes.paths import chunked

    monkeypatch.setattr(chunked, "_QUERIES", most)
    for path, _, outcome in compiled(varlen(BATCHES["mixed"], window_size=(5, 0)), tensors(*BATCHES["mixed"])):
        assert outcome.path == path


@takes("seqused_k")
def test_keys_that_are_not_used_and_tokens_of_no_sequence() -> None:
    batch = [4, 1, 5], [9, 3, 6]
    x, *others = tensors(*batch)
    x = torch.cat([x, *[x] * 9])  # padding behind the last sequence
    for path, _, outcome in compiled(
        lambda *args: varlen(batch, window_size=(-1, 0), seqused_k=args[-1], scale=0.3)(*args[:-1]),
        (x, *others, torch.tensor([7, 3, 0])),
    ):
        assert outcome.path == path


def test_a_sequence_longer_than_the_longest_is_no_number() -> None:
    """One with more keys than the given maximum gives NaN; the others are right."""
    batch = [2, 3], [4, 9]
    inputs = tensors(*batch)
    for path in ("absorbed", "chunked"):
        module = capture(varlen(([3], [8])), *inputs)
        rewrite(module, path)
        o = run(module, *inputs)
        assert o[2:].isnan().all()
        check_right(varlen(batch)(*inputs)[:2], o[:2])


@takes("enable_gqa")
def test_heads_that_share_keys_are_groups() -> None:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = naive(*args[:5])
        q = torch.cat([q, q.flip(0)], 1).unflatten(1, (2, N)).transpose(1, 2).flatten(1, 2)
        return varlen_attn(q, k, v, *args[5:], 30, 41, window_size=(-1, 0), enable_gqa=True)

    for path, _, outcome in compiled(attention, tensors(*BATCHES["mixed"])):
        assert (outcome.path, outcome.shapes["N"]) == (path, str(2 * N))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, **options: Any) -> Tensor:
    options = {"softcap": 0.0, "alibi_slopes": None} | options
    op = torch.ops.flash_attn._flash_attn_varlen_forward.default
    return op(q, k, v, starts, ends, 30, 41, 0.0, SCALE, True, -1, -1, **options)[0]


def test_flash_attention_s_op() -> None:
    def attention(*args: Tensor) -> Tensor:
        return flash_attention(*naive(*args[:5]), *args[5:])[..., :V]

    for path, module, outcome in compiled(attention, tensors(*BATCHES["mixed"])):
        assert (outcome.path, outcome.mask) == (path, "sequences + causal")
        assert "_flash_attn_varlen_forward" not in module.code


def aten(*args: Tensor) -> Tensor:
    most = 30, 41, 0.0, True, False
    return torch.ops.aten._flash_attention_forward.default(*naive(*args[:5]), *args[5:], *most, scale=SCALE)[0]


def test_the_op_that_torch_makes_of_it_is_read_alike() -> None:
    inputs = tensors(*BATCHES["mixed"])
    (outcome,) = rewrite(capture(aten, *(t.to("meta") for t in inputs)))
    assert (outcome.path, outcome.mask) == ("absorbed", "sequences + causal")


def of_backend(
    backend: SDPBackend, window: tuple[int, int] = (-1, 0), shared: bool = False, **options: Any
) -> Function:
    """torch's op as `varlen_attn` calls it for the kernels `backend`; `shared`: keys start where queries do."""

    def attention(*args: Tensor) -> Tensor:
        starts = args[5], args[5 if shared else 6]
        options_of_op = {"is_causal": window == (-1, 0), "window_size": window, "backend": backend.value} | options
        op = torch.ops.torch_attn._varlen_attn.default
        return op(*naive(*args[:5]), *starts, 30, 41, **options_of_op)[0][..., :V]

    return attention


chooses = pytest.mark.skipif(
    all(argument.name != "backend" for argument in torch.ops.torch_attn._varlen_attn.default._schema.arguments),
    reason="torch's op of packed sequences takes no backend",
)
FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
OF_BACKENDS = {
    "flash": ("mixed", of_backend(FLASH), "sequences + causal"),
    "flash, window": ("mixed", of_backend(FLASH, (3, 0)), "sequences + causal + window"),
    "cudnn": ("mixed", of_backend(CUDNN, (-1, -1)), "sequences"),
    "cudnn, causal": ("prompts", of_backend(CUDNN, shared=True), "sequences + causal"),
}


@chooses
@pytest.mark.parametrize(("batch", "function", "mask"), OF_BACKENDS.values(), ids=OF_BACKENDS)
def test_kernels_that_compute_the_same_are_alike(batch: str, function: Function, mask: str) -> None:
    for path, _, outcome in compiled(function, tensors(*BATCHES[batch])):
        assert (outcome.path, outcome.mask) == (path, mask), outcome.reason


@chooses
def test_values_need_no_padding_where_the_op_takes_narrow_ones() -> None:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = naive(*args[:5])
        return varlen_attn(q, k, v[..., :V], *args[5:], 30, 41, window_size=(-1, 0))

    for path, _, outcome in compiled(attention, tensors(*BATCHES["mixed"])):
        assert outcome.path == path


def with_lse(*args: Tensor) -> tuple[Tensor, Tensor]:
    options = {"window_size": (-1, 0), "return_aux": AuxRequest(lse=True)}
    return varlen_attn(*naive(*args[:5]), *args[5:], 30, 41, **options)


LEFT: dict[str, tuple[Function, str]] = {
    "lse": (with_lse, "found that other results are read too"),
    "softcap": (lambda *a: flash_attention(*naive(*a[:5]), *a[5:], softcap=9.0), "without softcap, found 9.0"),
    "alibi": (
        lambda *a: flash_attention(*naive(*a[:5]), *a[5:], alibi_slopes=torch.ones(N)),
        "without alibi_slopes, found a tensor",
    ),
    "keys behind": (
        varlen(BATCHES["mixed"], window_size=(-1, 2)),
        "or has no end, found one that ends 2 keys after it",
    ),
}

ANOTHER = "causal only where queries and keys start at the same places, found other"
LEFT_OF_BACKENDS = {
    "cudnn, causal": (of_backend(CUDNN), ANOTHER),
    "cudnn, window": (of_backend(CUDNN, (3, 0), shared=True), ANOTHER),
    "cudnn, window that it is not told of": (of_backend(CUDNN, shared=True, is_causal=False), ANOTHER),
    "unknown": (of_backend(SDPBackend.MATH), f"found {SDPBackend.MATH.value} as its backend"),
}


@chooses
@pytest.mark.parametrize(("function", "reason"), LEFT_OF_BACKENDS.values(), ids=LEFT_OF_BACKENDS)
def test_kernels_that_compute_another_leave_it_unchanged(function: Function, reason: str) -> None:
    (outcome,) = rewrite(capture(function, *tensors(*BATCHES["mixed"])))
    assert outcome.path == "unchanged"
    assert reason in outcome.reason


@pytest.mark.parametrize(("function", "reason"), LEFT.values(), ids=LEFT)
def test_what_else_is_said_leaves_it_unchanged(function: Function, reason: str) -> None:
    (outcome,) = rewrite(capture(function, *tensors(*BATCHES["mixed"])))
    assert outcome.path == "unchanged"
    assert reason in outcome.reason


def test_keys_that_are_no_up_projection_are_left() -> None:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = naive(*args[:5])
        return varlen_attn(q, k, v.tanh(), *args[5:], 30, 41)

    inputs = tensors(*BATCHES["mixed"])
    module = capture(attention, *inputs)
    (outcome,) = rewrite(module)
    assert outcome.path == "unchanged"
    check_right(attention(*inputs), run(module, *inputs))
