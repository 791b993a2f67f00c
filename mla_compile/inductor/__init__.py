"""What Inductor is given and told once a graph is rewritten: launches, products, loops, decompositions."""
