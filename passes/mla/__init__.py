"""Prove that an attention is MLA, or say why not."""
