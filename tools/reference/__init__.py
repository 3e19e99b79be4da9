"""The pages of docs/reference, each from what the code declares."""
