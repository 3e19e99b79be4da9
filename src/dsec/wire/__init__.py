"""Contracts between processes, and the only decoder."""
