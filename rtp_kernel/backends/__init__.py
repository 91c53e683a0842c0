"""Accelerated implementations of ops, one package per kind of device, imported when a registry first asks for them."""
