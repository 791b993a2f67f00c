"""Graphs that need gradients: attention is rewritten in the Dynamo graph, before anything is differentiated."""
