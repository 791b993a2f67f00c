"""`mla-compile bench`: compare modes of one MLA layer of transformers with each other and the machine's limit."""
