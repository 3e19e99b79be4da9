"""Sandboxes that are whole machines: any disk, a firmware, a screen."""
