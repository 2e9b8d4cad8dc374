"""How PyTorch's operators become JAX's while traced: what torchax lacks or computes wrongly."""
