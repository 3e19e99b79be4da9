"""Calls and streams between API and node over one TCP connection with mutual TLS."""
