"""How fast the links of a real cluster are: what `plan.py --measure` runs and writes."""
