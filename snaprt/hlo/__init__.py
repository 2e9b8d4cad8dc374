"""XLA's own messages, HLO modules and literals, as protocol buffers."""
