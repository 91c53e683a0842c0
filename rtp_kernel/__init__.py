"""Ops and components of rtp: everything here knows tensors, and nothing of requests, checkpoints or plugins."""
