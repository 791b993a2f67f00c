"""Graphs and proofs as text, one line each, in the words of the algebra."""
