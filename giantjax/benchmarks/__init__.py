"""Measurements that the documentation quotes; each prints both sides of its comparison from one run."""
