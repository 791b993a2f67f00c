"""Implementations of the mla ops; importing `register` registers them with torch.

Each op has a folder: `reference.py` is the equation, in any dtype, and the oracle of the tests; `aten.py` is built from
ATen operations, with bounded memory, and is registered for every device.
"""
