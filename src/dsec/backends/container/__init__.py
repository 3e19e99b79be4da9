"""Containers: namespaces, id ranges, cgroups, seccomp, an overlay of EROFS layers; started by `dsec-launch`."""
