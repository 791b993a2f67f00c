"""The tests. Processes that they start import this module too."""

import gc

# Millions of objects of torch, sympy and transformers outlive every test. Collecting garbage after every 700 new
# objects, Python's default, took an eighth of the time of tests that compile a model; after every 50,000, a twentieth.
gc.set_threshold(400_000, 5, 20)
