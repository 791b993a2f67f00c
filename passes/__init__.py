"""Graph passes: from a functional ATen graph to one whose MLA sites are mla ops. They never import kernels."""
