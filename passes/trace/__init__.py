"""Provenance: the form of every tensor of a graph, with a table of handlers for each kind of op."""
