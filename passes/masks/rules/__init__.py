"""What one operation makes of the positions, truths and numbers of its operands: a table for each kind of op."""
