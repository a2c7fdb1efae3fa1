"""Attention over one rectangle of rows and columns, on one device."""
