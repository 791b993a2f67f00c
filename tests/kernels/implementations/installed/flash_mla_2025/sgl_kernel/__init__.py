"""SGLang's kernels, of which only FlashMLA is here."""
