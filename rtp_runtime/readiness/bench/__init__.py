"""Speed and size of a model in this process: time to first token, time per output token, throughput, memory."""
