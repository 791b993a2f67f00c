"""How keys are stored: in one tensor, in pages, in few bits, shared out over ranks."""
