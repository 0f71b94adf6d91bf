"""What a plan costs, from configuration and hardware facts alone: no jax."""
