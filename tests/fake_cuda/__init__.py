"""Find what torch and Inductor would run on an H100 or an A100, on a machine without a GPU.

Nothing runs: tensors are fake, and a device guard that does nothing takes the place of CUDA's. This cannot be undone in
a process, so tests start another one: `python -m tests.fake_cuda GPU CASE ...`.
"""
