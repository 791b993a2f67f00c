"""What the mla ops compute; `register` makes torch know it.

One folder an op: `reference.py` is the equation, in any dtype, and the oracle of the tests; `aten.py` is made of ATen
operations, bounded in memory, and registered for every device.
"""
