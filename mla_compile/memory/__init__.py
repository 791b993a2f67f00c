"""Plan memory: the bytes that a cache of each layout takes, computed from a model's config alone."""
