"""Two cores are shared by all tests."""

import torch

torch.set_num_threads(1)
