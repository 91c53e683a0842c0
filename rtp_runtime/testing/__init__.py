"""For authors of plugins: tiny checkpoints of any config, and the suite that a model must pass. Public."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime.exports import lazy_names

if TYPE_CHECKING:
    from rtp_runtime.testing.checking import assert_check_passes
    from rtp_runtime.testing.checkpoints import tiny_checkpoint
    from rtp_runtime.testing.compare import check_plugin
    from rtp_runtime.testing.conformance import ModelConformance
    from rtp_runtime.testing.shrink import shrink_config

__all__ = ["ModelConformance", "assert_check_passes", "check_plugin", "shrink_config", "tiny_checkpoint"]

__getattr__ = lazy_names(
    __name__,
    {
        "ModelConformance": "conformance",
        "assert_check_passes": "checking",
        "check_plugin": "compare",
        "shrink_config": "shrink",
        "tiny_checkpoint": "checkpoints",
    },
)
