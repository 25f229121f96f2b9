"""What users hand over with a model: batches as trees of tensors, constants, what a loss function returns."""
