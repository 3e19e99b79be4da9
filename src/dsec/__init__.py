"""dsec: isolated, stateful places for AI agents to work in, on four substrates."""

__version__ = "0.1.0"
