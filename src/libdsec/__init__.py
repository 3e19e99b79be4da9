"""The published client names, on top of `dsec`."""
