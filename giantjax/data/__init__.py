"""Corpora: Megatron's indexed files, tokenizers, samples and batches."""
