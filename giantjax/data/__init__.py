"""Corpora: indexed token files, tokenizers, and the order in which training reads them."""
