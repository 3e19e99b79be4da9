"""Structured logs, metrics and the ids that tie them together. Nothing here is imported by `import dsec`."""
