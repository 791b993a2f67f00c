"""Attention whose heads or tokens are shared out over ranks."""
