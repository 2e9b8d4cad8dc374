"""Find the operation where two sides of a program start to differ; `pipeline` has the whole way."""
