"""Recognition of a reference's blocks, each from what it was seen to compute on random data."""

from rtp_runtime.enable.recognise.decoder import recognise_decoder

__all__ = ["recognise_decoder"]
