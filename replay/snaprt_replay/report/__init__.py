"""What people look at: a page, text, JUnit XML and Model Explorer's files. Never imports JAX."""
