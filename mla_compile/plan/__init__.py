"""Plan memory: what a cache of each layout takes, from a model's config alone."""
