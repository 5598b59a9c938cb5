"""A model server whose cold start takes seconds."""

__version__ = "0.1.0"
