"""`mla-compile bench --model`: `generate` of a whole model, each way to compile it with each cache."""
