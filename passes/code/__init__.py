"""Torch code for proved reads: written, traced, and put into a graph."""
