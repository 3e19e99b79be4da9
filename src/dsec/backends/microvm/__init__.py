"""Sandboxes that are small virtual machines of our own making, cloned from templates."""
