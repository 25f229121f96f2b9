"""What a program runs on: PyTorch's dispatcher, `torch.distributed`, and the processor of the host."""
