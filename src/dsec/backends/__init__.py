"""Substrates: sibling folders that give a running instance and a byte channel to it, nothing more."""
