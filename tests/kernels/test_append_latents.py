"""mla::append_latents: the bytes that it writes, in DeepSeek's layout and with one scale, and attention over them."""

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.fp8 import FP8, RowLayout
from mla_compile.kernels.append_latents import append_latents_reference
from mla_compile.kernels.coded import dequantised

ALL_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
append_latents = torch.ops.mla.append_latents

# L, R, page_size
SIZES = {"DeepSeek": (512, 64, 4), "one group": (40, 6, 3), "no rope": (256, 0, 1), "odd": (13, 3, 5)}


def make(sizes, dtype=torch.bfloat16, tokens=7, one_scale=False):
    """latent, k_rope, slots of which one is left out (-1), rows that are not zero, and a scale or None."""
    rank, rope, page_size = sizes
    latent = torch.randn(tokens, rank) * torch.rand(tokens, 1).mul(8).exp()
    places = torch.randperm(4 * page_size if 4 * page_size > tokens else 4 * tokens)
    slots = places[:tokens].clone()
    slots[2] = -1
    pages = -(-len(places) // page_size)
    width = rank + rope if one_scale else RowLayout(rank, rope, dtype).row_bytes
    rows = torch.randint(0, 100, (pages, page_size, width), dtype=torch.uint8)
    scale = torch.tensor(latent.abs().max().item() / 300) if one_scale else None
    rows = rows.view(FP8) if one_scale else rows
    return latent.to(dtype), torch.randn(tokens, rope).to(dtype), slots, rows, scale


def appended(op, latent, k_rope, slots, rows, scale):
    rows = rows.clone()
    op(latent, k_rope, slots, rows, scale)
    return rows.view(torch.uint8)


def test_a_token_of_deepseek_takes_656_bytes():
    layout = RowLayout(512, 64, torch.bfloat16)
    assert layout.row_bytes == 656
    parts = layout.views(torch.zeros(2, 3, 656, dtype=torch.uint8))
    assert [(part.shape[2], part.dtype) for part in parts] == [(512, FP8), (4, torch.float32), (64, torch.bfloat16)]


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_bytes_of_the_reference(sizes, dtype, one_scale):
    given = make(sizes, dtype, one_scale=one_scale)
    assert torch.equal(appended(append_latents, *given), appended(append_latents_reference, *given))


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_is_read_again_is_what_was_appended(sizes, one_scale):
    rank, rope, page_size = sizes
    latent, k_rope, slots, rows, scale = make(sizes, one_scale=one_scale)
    before = rows.clone()
    append_latents(latent, k_rope, slots, rows, scale)
    if one_scale:
        numbers, scales, ropes = rows[..., :rank], scale.expand(*rows.shape[:2], 1), rows[..., rank:]
    else:
        numbers, scales, ropes = RowLayout(rank, rope, torch.bfloat16).views(rows)
    read, read_rope = dequantised(numbers, ropes, scales, torch.float32)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        place = slot // page_size, slot % page_size
        # e4m3 keeps four significant bits; below 2^-6 its steps are 2^-9, times the scale.
        allowed = latent[token].float().abs() / 16 + scales[place].max() * 2.0**-10
        assert ((read[place] - latent[token].float()).abs() <= allowed).all()
        if not one_scale:
            assert torch.equal(read_rope[place], k_rope[token].float())
    untouched = torch.ones(rows.shape[:2], dtype=torch.bool).flatten()
    untouched[slots[slots >= 0]] = False
    same = rows.view(torch.uint8).flatten(0, 1) == before.view(torch.uint8).flatten(0, 1)
    assert same[untouched].all()


def test_zeros_and_a_number_that_is_too_great():
    latent, k_rope = torch.zeros(1, 128), torch.zeros(1, 0)
    rows = torch.full((1, 1, RowLayout(128, 0, torch.float32).row_bytes), 7, dtype=torch.uint8)
    append_latents(latent, k_rope, torch.tensor([0]), rows)
    assert not RowLayout(128, 0, torch.float32).views(rows)[0].float().any()
    rows = torch.zeros(1, 1, 128, dtype=FP8)
    append_latents(latent + 1000, k_rope, torch.tensor([0]), rows, torch.tensor(1.0))
    assert torch.equal(rows.float(), torch.full((1, 1, 128), 448.0))


def test_attention_over_what_was_appended():
    rank, rope, page_size = SIZES["DeepSeek"]
    latent, k_rope = torch.randn(8, rank), torch.randn(8, rope)
    layout = RowLayout(rank, rope, torch.float32)
    rows = torch.zeros(2, page_size, layout.row_bytes, dtype=torch.uint8)
    append_latents(latent, k_rope, torch.tensor([4, 5, 6, 7, 0, 1, 2, 3]), rows)
    numbers, scales, ropes = layout.views(rows)
    q_latent, q_rope = torch.randn(1, 1, 2, rank), torch.randn(1, 1, 2, rope)
    table, lengths = torch.tensor([[1, 0]]), torch.tensor([8])
    o, _ = torch.ops.mla.paged_latent_attention(q_latent, q_rope, numbers, ropes, table, lengths, True, 0.04, scales)
    exact, _ = torch.ops.mla.latent_attention(q_latent, q_rope, latent[None], k_rope[None], None, None, 0.04)
    # Each value is off by at most 1/16, and weights by as much, for scores of about 1.
    assert (o - exact).abs().max() < latent.abs().max() / 8


@pytest.mark.parametrize("one_scale", [False, True])
def test_opcheck(one_scale):
    # To check the schema, torch compares tensors by an operation that it lacks for FP8.
    tests = ("test_faketensor", "test_aot_dispatch_dynamic") if one_scale else ALL_TESTS
    given = make(SIZES["one group"], torch.float32, one_scale=one_scale)
    torch.library.opcheck(append_latents.default, given, test_utils=tests)


def test_compiled_it_writes_in_place():
    latent, k_rope, slots, rows, _ = make(SIZES["one group"], torch.float32)
    expected = appended(append_latents, latent, k_rope, slots, rows, None)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(latent, k_rope, slots, rows):
        append_latents(latent * 1, k_rope, slots, rows)
        return rows[0, 0, 0]

    address = rows.data_ptr()
    step(latent, k_rope, slots, rows)
    assert torch.equal(rows, expected)
    assert rows.data_ptr() == address


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, torch.zeros(7, 2, 2), r"expected latent of shape \[tokens, L\], found \[7, 2, 2\]"),
        (1, torch.zeros(6, 6), r"expected k_rope of shape \[tokens, R\] = \[7, 6\], found \[6, 6\]"),
        (1, torch.zeros(7, 6).half(), "expected k_rope of latent's torch.float32 on cpu, found torch.float16"),
        (2, torch.full((7,), 10**6), r"expected slots below 12, found slots\[0\] = 1000000"),
        (2, torch.zeros(7), "expected slots of torch.int32 or torch.int64 on cpu, found torch.float32"),
        (3, torch.zeros(2, 3, 40, dtype=torch.uint8), r"expected rows of shape .* = \[2, 3, 80\], found \[2, 3, 40\]"),
        (3, torch.zeros(2, 3, 80), "expected rows of torch.uint8 on cpu, found torch.float32"),
        (4, torch.ones(2), r"expected one scale for all tokens, found \[2\]"),
    ],
)
def test_wrong_arguments_are_named(position, wrong, message):
    arguments = list(make(SIZES["one group"], torch.float32, one_scale=position == 4))
    arguments[position] = wrong
    with pytest.raises(KernelError, match=message):
        append_latents(*arguments)
