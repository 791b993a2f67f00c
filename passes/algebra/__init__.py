"""The axis algebra: what a tensor's elements are. Pure Python: no torch, no graphs."""
