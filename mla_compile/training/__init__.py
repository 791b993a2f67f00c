"""Rewrite attention in graphs that need gradients: in the Dynamo graph, before differentiation."""
