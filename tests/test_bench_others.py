"""Other projects' kernels in the benchmark: stand-ins with their signatures, computed in plain torch.

An argument with another meaning than the signature's gives a wrong result, which the benchmark's own check finds.
"""

import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from mla_compile.bench import kernel_others, kernel_run
from mla_compile.bench.kernel_cases import Case
from mla_compile.cost import Device
from mla_compile.kernels._common.machine import Machine

CPU = torch.device("cpu")


def attend(q, keys, scale, causal=False, columns=512):
    """q `[Sq, N, 576]` over keys `[T, 576]`."""
    scores = torch.einsum("snl,tl->snt", q, keys) * scale
    if causal:
        hidden = torch.ones(len(q), len(keys), dtype=torch.bool).triu(len(keys) - len(q) + 1)
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return scores.softmax(-1) @ keys[:, :columns]


def keys_of(pages, table, length):
    return pages[table.long()].flatten(0, 1)[:length]


class FlashMLA:
    def get_mla_metadata(
        self, cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None
    ):
        assert num_heads_k == 1
        return ("metadata", num_q_tokens_per_head_k), None

    def flash_mla_with_kvcache(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=False,
        indices=None,
    ):
        assert tile_scheduler_metadata == ("metadata", q.shape[1] * q.shape[2])
        assert k_cache.shape[1:3] == (64, 1)
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        if is_fp8_kvcache:
            assert indices.dtype == torch.int32
            rows = k_cache.flatten(0, 2)  # 512 numbers, 4 scales, 64 of bfloat16 (here float32)
            latent = rows[:, :512].float().unflatten(1, (4, 128))
            latent *= rows[:, 512:528].contiguous().view(torch.float32)[:, :, None]
            rope = rows[:, 528:].contiguous().view(q.dtype)
            keys = torch.cat([latent.flatten(1), rope], 1)
            o = [
                torch.cat([attend(query[None], keys[at], softmax_scale) for query, at in zip(*of, strict=True)])
                for of in zip(q, indices.long(), strict=True)
            ]
            return torch.stack(o), None
        sequences = zip(q, block_table, cache_seqlens, strict=True)
        o = [attend(x, keys_of(k_cache[:, :, 0], t, n), softmax_scale, causal, head_dim_v) for x, t, n in sequences]
        return torch.stack(o), None


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer, use_cuda_graph=False, backend="auto"):
        assert float_workspace_buffer.numel() * float_workspace_buffer.itemsize == 128 << 20

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        use_profiler=False,
    ):
        assert {t.dtype for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        assert (head_dim_ckv, head_dim_kpe, page_size) == (512, 64, 64)
        self.queries, self.starts, self.pages, self.lengths = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        self.heads, self.causal, self.scale = num_heads, causal, sm_scale
        self.dtypes = q_data_type, kv_data_type

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        assert (q_nope.dtype, ckv_cache.dtype) == self.dtypes
        assert q_nope.shape[1] == self.heads
        q, pages = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
        o = []
        for b, length in enumerate(self.lengths):
            keys = keys_of(pages, self.pages[self.starts[b] : self.starts[b + 1]], length)
            o.append(attend(q[self.queries[b] : self.queries[b + 1]], keys, self.scale, self.causal))
        return torch.cat(o)


def vllm_decode(
    q,
    k_buffer,
    v_buffer,
    o,
    lse,
    req_to_token,
    b_seq_len,
    attn_logits,
    num_kv_splits,
    sm_scale,
    page_size=1,
    logit_cap=0.0,
    k_scale=None,
    v_scale=None,
    is_mla=False,
):
    for factor in (k_scale, v_scale):  # if it gets none, it makes them on the host at each call
        assert (factor.item(), factor.dtype, factor.device, factor.shape) == (1.0, torch.float32, q.device, ())
    assert is_mla  # else values are loaded by themselves, and not taken from the keys
    assert attn_logits.shape == (*q.shape[:2], num_kv_splits, 513)
    assert attn_logits.dtype == torch.float32
    assert k_buffer.shape[-3:-1] == v_buffer.shape[-3:-1] == (page_size, 1)
    assert lse.shape == q.shape[:2]
    for b, length in enumerate(b_seq_len):
        o[b] = attend(
            q[b][None], keys_of(k_buffer[:, :, 0], req_to_token[b], length), sm_scale, False, v_buffer.shape[-1]
        )


def sglang_decode(
    q,
    k_buffer,
    v_buffer,
    o,
    kv_indptr,
    kv_indices,
    attn_logits,
    attn_lse,
    num_kv_splits,
    max_kv_splits,
    sm_scale,
    k_scale,
    v_scale,
    logit_cap=0.0,
    sinks=None,
    xai_temperature_len=-1,
    has_mla=False,
    use_pdl=False,
    page_size=1,
):
    assert (has_mla, use_pdl, page_size) == (True, True, 1)
    assert attn_logits.shape == (*attn_lse.shape, v_buffer.shape[-1]) == (*q.shape[:2], max_kv_splits, 512)
    assert attn_logits.dtype == attn_lse.dtype == torch.float32
    assert ((num_kv_splits > 0) & (num_kv_splits <= max_kv_splits)).all()
    assert (kv_indptr.dtype, kv_indices.dtype, num_kv_splits.dtype) == (torch.int32, torch.int64, torch.int32)
    assert k_buffer.shape[1] == 1
    for b in range(len(q)):
        keys = k_buffer[kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long(), 0]
        o[b] = attend(q[b][None], keys, sm_scale * k_scale) * v_scale


STAND_INS = {
    "flash_mla": FlashMLA(),
    "flashinfer.mla": SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper),
    "vllm.v1.attention.ops.triton_decode_attention": SimpleNamespace(decode_attention_fwd=vllm_decode),
    "sglang.kernels.ops.attention.decode_attention": SimpleNamespace(decode_attention_fwd=sglang_decode),
}
ONE = Case("decode", 2, 1, 192, 3)
SEVERAL = Case("decode", 2, 3, 192, 3)
FP8 = Case("decode", 2, 1, 192, 3, fp8=True)
NAMED = Case("sparse", 2, 2, 192, 64, fp8=True)
TAKEN = {
    "flashmla": [ONE, SEVERAL, NAMED],
    "flashinfer": [ONE, SEVERAL],
    "vllm": [ONE],
    "sglang": [ONE],
}


@pytest.fixture
def measured(monkeypatch):
    """Results of a peer in all cases, on the CPU, which says that it is an H100."""
    monkeypatch.setattr(kernel_others, "present", lambda _: Machine("sm_90", 132))
    monkeypatch.setattr(kernel_run, "limits_of", lambda *_: Device("a GPU", 8e14, 4e12))

    def run(peer):
        cases = [ONE, SEVERAL, FP8, NAMED]
        return kernel_run.run(cases, (peer,), CPU, torch.float32, lambda call: (call(), 0.001)[1])[1]

    return run


@pytest.mark.parametrize("peer", TAKEN)
def test_it_is_called_as_its_signature_says(measured, monkeypatch, peer):
    monkeypatch.setattr(importlib, "import_module", lambda name: STAND_INS[name])
    found = measured(peer)
    assert [result.case for result in found] == TAKEN[peer]
    assert [(result.status, result.note) for result in found] == [("ok", "")] * len(found)


@pytest.mark.parametrize("peer", TAKEN)
def test_what_is_not_installed_is_left_out(measured, peer):
    assert measured(peer) == []


def test_what_does_not_import_ends_nothing(measured, monkeypatch):
    def broken(name):
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    (result,) = measured("vllm")
    assert (result.status, result.note) == (
        "failed",
        "ImportError: libcudart.so.12: cannot open shared object file",
    )


def test_an_older_gpu_launches_nothing_early(measured, monkeypatch):
    def decode_attention_fwd(*given, use_pdl=False, **named):
        early.append(use_pdl)
        sglang_decode(*given, **named | {"use_pdl": True})

    early = []
    decode_attention_fwd.__signature__ = inspect.signature(sglang_decode)
    older = SimpleNamespace(decode_attention_fwd=decode_attention_fwd)
    monkeypatch.setattr(importlib, "import_module", lambda name: older)
    monkeypatch.setattr(kernel_others, "present", lambda _: Machine("sm_80", 108))
    (result,) = measured("sglang")
    assert (result.status, result.note, set(early)) == ("ok", "", {False})


def test_an_older_version_gets_no_argument_that_it_lacks(measured, monkeypatch):
    def decode_attention_fwd(q, k, v, o, lse, table, lengths, logits, splits, sm_scale, page_size=1, logit_cap=0.0):
        one = torch.ones(())
        named = {"k_scale": one, "v_scale": one, "is_mla": True}
        return vllm_decode(q, k, v, o, lse, table, lengths, logits, splits, sm_scale, page_size, **named)

    older = SimpleNamespace(decode_attention_fwd=decode_attention_fwd)
    monkeypatch.setattr(importlib, "import_module", lambda name: older)
    (result,) = measured("vllm")
    assert (result.status, result.note) == ("ok", "")


@pytest.mark.parametrize(
    ("peer", "place"),
    [
        ("vllm", "vllm.attention.ops.triton_decode_attention"),
        ("sglang", "sglang.srt.layers.attention.triton_ops.decode_attention"),
    ],
)
def test_an_older_place_of_a_module_is_found(monkeypatch, peer, place):
    def there(name):
        if name != place:
            raise ModuleNotFoundError(name)
        return "the module"

    monkeypatch.setattr(importlib, "import_module", there)
    assert kernel_others.OTHERS[peer].module() == "the module"


@pytest.mark.parametrize(
    ("B", "T", "N", "vllm", "sglang"),
    [
        (64, 8192, 16, 16, (15, 256)),
        (16, 32768, 128, 64, (10, 256)),
        (1, 131072, 16, 256, (256, 256)),
        (1, 131072, 128, 256, (182, 256)),
        (256, 1024, 16, 2, (3, 32)),
        (4, 64, 128, 1, (5, 8)),
    ],
)
def test_sequences_are_cut_as_their_projects_do(B, T, N, vllm, sglang):
    case = Case("decode", B, 1, T, N)
    assert kernel_others._vllm_splits(case, 132) == vllm
    assert kernel_others._sglang_splits(case, 132) == sglang


@pytest.mark.parametrize(("N", "T", "taken"), [(64, 192, True), (128, 192, True), (16, 192, False), (64, 96, False)])
def test_flash_mla_takes_named_keys_of_some_shapes(N, T, taken):
    assert kernel_others.OTHERS["flashmla"].takes(Case("sparse", 1, 1, T, N, fp8=True)) == taken


def test_what_is_broken_is_a_failure(measured, monkeypatch):
    broken = SimpleNamespace(decode_attention_fwd=lambda: None)
    monkeypatch.setattr(importlib, "import_module", lambda name: broken)
    (result,) = measured("vllm")
    assert result.status == "failed"
    assert "TypeError" in result.note
