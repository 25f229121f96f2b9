"""The runtime: walks a plan on `torch.distributed`, or on threads of one process."""
