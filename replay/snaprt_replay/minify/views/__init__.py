"""Ways to make a program smaller, one a module; each yields candidates, and judges none."""
