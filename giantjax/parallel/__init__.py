"""Meshes and what is spread over them."""
