"""Which nodes there are: joining, signs of life, verdicts."""
