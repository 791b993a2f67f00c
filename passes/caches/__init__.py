"""How keys are stored: in pages, in FP8."""
