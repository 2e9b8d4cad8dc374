"""The commands that run recorded executions: replay, localize, minify, report."""
