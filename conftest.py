"""What all tests share: one thread per worker, no network, and none of the caller's rtp settings."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
for name in [name for name in os.environ if name.startswith("RTP_")]:
    del os.environ[name]
