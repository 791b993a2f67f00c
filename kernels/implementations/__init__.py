"""Kernels of other projects, used where their packages are installed: what each takes, and which one is called.

`table` lists them, with one file per project; `choose` decides once for each layout of a call. None is a dependency.
"""
