"""What the Triton kernels share: device functions, and what is chosen on the host before a launch."""
