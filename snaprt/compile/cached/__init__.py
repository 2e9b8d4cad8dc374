"""What stands between programs and the persistent cache: which cache, what it holds, who waits."""
