"""How keys are stored: in one tensor, in pages, in FP8 or INT8, shared out over ranks."""
