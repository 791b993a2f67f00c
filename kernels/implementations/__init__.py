"""Kernels of other projects, where their packages are installed: what each takes, and which is called.

`table` lists them, one file a project; `choose` decides once for each layout of a call. Nothing here is a dependency.
"""
