"""The model: layers, the GPT made of them, its loss."""
