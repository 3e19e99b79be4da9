"""Shared words: ids, specs, states, errors, limits, units, clock. No I/O."""
