"""fx nodes in the terms of the passes: sizes, arguments, lines of source, refusals."""
