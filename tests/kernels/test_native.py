"""Building C++ kernels: those of the ops can be built. `test_dispatcher.py` tests code that does not compile."""

import pytest
import torch
from torch._inductor import config

from mla_compile.kernels import native
from mla_compile.kernels.expanded_attention import native as expanded_attention
from mla_compile.kernels.latent_attention import cached
from mla_compile.kernels.per_head_matmul import native as per_head_matmul


def test_a_kernel_takes_tensors_and_numbers(tmp_path):
    source = tmp_path / "fill.cpp"
    source.write_text("""
        #include <cstdint>
        #include <stdexcept>
        #include <type_traits>
        extern "C" void kernel(float* out, int64_t size, float value) {
          for (int64_t i = 0; i < size; ++i) out[i] = value;
        }
    """)
    out = torch.zeros(3)
    native.load((source,), ("float*", "int64_t", "float"))(out, 2, 0.5)
    assert out.tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_over_latents_is_built(dtype):
    assert cached.KERNELS.of(dtype, dtype, dtype) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_over_chunks_is_built(dtype):
    kernel = expanded_attention.KERNELS.of(dtype)
    assert kernel is not None
    in_pairs = dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    assert native.constant(kernel, "bytes_of_a_key") == (2 if in_pairs else 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_per_head_are_built(dtype):
    assert per_head_matmul.KERNELS.of(dtype) is not None


def test_what_is_compiled_in_the_background_has_the_settings_of_the_caller():
    with config.patch({"cpp.simdlen": 256}):
        assert native._progress.submit(lambda: config.cpp.simdlen).result() == 256
