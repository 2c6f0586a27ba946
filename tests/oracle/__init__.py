"""Differential tests against Hugging Face transformers; they need torch and run by `make oracle-test` only.

`checkpoint` is the exception: it makes random tiny checkpoints with numpy alone, for the torch-free tests
too.
"""
