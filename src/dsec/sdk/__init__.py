"""What users import: the client library. `dsec` itself re-exports its names."""
