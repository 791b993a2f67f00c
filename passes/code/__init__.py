"""Torch code of proved reads, traced and put into a graph."""
