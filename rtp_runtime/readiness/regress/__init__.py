"""Comparing runs with baselines: a case file says what is expected, and what is missing is never green."""
