"""Find the first operation where two sides differ; `pipeline` has the whole way."""
