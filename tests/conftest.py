"""Kernels are Python in tests. Triton decides that when a kernel's module is imported, so it is said before any is."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
