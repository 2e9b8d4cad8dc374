"""Read any recorded execution, or a dump by XLA, as a case that can be run."""
