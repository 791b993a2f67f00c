"""Shared by the Triton kernels: device functions, and the choices made on the host before a launch."""
