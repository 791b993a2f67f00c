"""Inspect a compilation: graphs before and after the passes, generated code, and a page that shows them."""
