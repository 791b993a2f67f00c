"""`mla-compile bench --model`: time `generate` of a whole model, for each way to compile it and each cache."""
