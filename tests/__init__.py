"""The tests. Processes that they start come by here too."""

import gc

# Millions of objects of torch, sympy and transformers outlive every test: looking for garbage among new ones after each
# 700 of them, as Python does, took an eighth of the time of tests that compile a model.
gc.set_threshold(50_000, 20, 20)
