"""Run matrix products for AMX, oneDNN's and ours, on a CPU with AVX-512 but no AMX: with the same results, but slowly.

oneDNN runs the code that it generates for CPUs with AMX, and our kernels find that they may use tiles; only the
instructions on tiles are emulated, by `tiles.c`.
This cannot be undone in a process, so tests start another one: `python -m tests.pretended_amx PYTEST_ARGUMENTS`.
"""
