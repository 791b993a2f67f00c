"""Changes to a graph: sums of weights distributed, sites replaced, equal code traced once, guards, writes in place."""
