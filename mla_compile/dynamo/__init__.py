"""Graphs as Dynamo hands them to a backend: sealed attention, branches, flex_attention, who differentiates them."""
