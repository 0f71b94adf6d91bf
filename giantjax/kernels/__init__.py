"""Kernels: one folder each, whose xla.py is the specification."""
