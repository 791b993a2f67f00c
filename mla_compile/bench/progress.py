"""Progress of a benchmark, on standard error: results go to standard output."""

import sys


def log(*words: object) -> None:
    """Print a line of progress."""
    print(*words, file=sys.stderr, flush=True)
