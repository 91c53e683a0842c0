"""Implementations for the CPU: fewer and larger calls, weights packed by oneDNN, and row-independent forms."""
