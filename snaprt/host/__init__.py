"""What Python and the operating system give: files, threads, imports, signals; nothing of JAX."""
