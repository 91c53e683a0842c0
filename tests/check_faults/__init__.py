"""Faults on purpose: models, ops and engine parts that are wrong in one place, for the tests of the checker."""
