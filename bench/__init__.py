"""Measurements: `make bench`, or `python -m bench --help`. Ratios within one run; absolute times mean little here."""
