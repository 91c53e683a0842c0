"""One thread: these models are tiny."""

import torch

torch.set_num_threads(1)
