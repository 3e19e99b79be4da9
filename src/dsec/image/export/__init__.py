"""Environments become images of the OCI. Blocking."""
