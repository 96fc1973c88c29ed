"""Benchmarks: each compares Pillarbox with the bare statements, measured alternately in one run."""
