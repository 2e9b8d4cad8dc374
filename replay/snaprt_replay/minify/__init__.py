"""Make the program that shows a failure as small as it gets; `pipeline` has the whole way."""
