"""oneDNN's products on AMX's tiles, on a CPU with AVX-512 that has none: right as on one that has, and slow.

What oneDNN then runs is the code that it generates for such CPUs; only the instructions of tiles are done by `tiles.c`.
For the rest of its life a process believes in those tiles, so tests start another one:
`python -m tests.pretended_amx PYTEST_ARGUMENTS`.
"""
