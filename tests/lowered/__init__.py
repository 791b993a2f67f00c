"""MLA programs drawn from a seed, lowered, packaged by AOTInductor, each run in a process of its own."""
