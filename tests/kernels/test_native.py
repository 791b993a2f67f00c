"""Building C++ kernels: what happens where that is impossible."""

import torch

from mla_compile.kernels import native


def test_code_that_does_not_compile_is_no_kernel(tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text("this is not C++")
    assert native.load((source,), ("float*",)) is None


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
