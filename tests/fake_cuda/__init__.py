"""What torch and Inductor would do on an H100 or an A100, on a machine without a GPU.

Nothing runs: tensors are fake, and a device guard that does nothing answers where torch asks for CUDA. For the rest of
its life a process believes in that GPU, so tests start another one: `python -m tests.fake_cuda GPU CASE ...`.
"""
