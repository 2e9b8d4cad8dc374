"""HLO modules: their instructions, pieces cut out of them, calls inlined."""
