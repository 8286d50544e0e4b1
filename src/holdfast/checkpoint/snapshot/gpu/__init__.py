"""Copy and digest tensors on GPUs without stopping the training stream."""
