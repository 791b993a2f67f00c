"""fx nodes in the words of the passes: sizes, arguments, lines of source, refusals."""
