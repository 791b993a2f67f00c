"""`mla-compile bench`: one MLA layer of transformers in several modes side by side, against the machine's limit."""
