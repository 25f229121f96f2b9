"""What a program runs on: PyTorch's dispatcher, `torch.distributed`, and the processor of the host."""

from stretto.backend import older_torch_adapter as older_torch_adapter  # its fake ops are known from here on
