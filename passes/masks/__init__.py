"""What masks mean, and how an op is told which keys a query sees."""
