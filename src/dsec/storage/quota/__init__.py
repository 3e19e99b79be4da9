"""Limits on what a directory may take of the disk: by the file system's project quota, or a file system of its own."""
