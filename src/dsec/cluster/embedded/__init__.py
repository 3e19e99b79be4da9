"""On one machine: shared state in this process, kept in SQLite."""
