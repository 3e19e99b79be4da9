"""Instances in memory, with an agent that speaks the real protocol: for tests and simulation."""
