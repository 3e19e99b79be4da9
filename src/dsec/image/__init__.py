"""Environments: what a sandbox starts from, made of layers."""
