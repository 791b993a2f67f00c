"""Find attention: sealed, or a softmax between two products."""
