"""Changes of a graph: sites replaced, the same code once, guards, writes in place."""
