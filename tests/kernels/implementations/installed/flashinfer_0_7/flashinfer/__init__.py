"""FlashInfer, of which only attention over latents is here."""
