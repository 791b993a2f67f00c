"""What a site becomes: each path, and the choice among them."""
