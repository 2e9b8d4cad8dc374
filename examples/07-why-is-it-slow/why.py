"""Report why the programs of slow.py are recompiled."""

import snaprt

with snaprt.CompilationProfiler() as profiler:
    import slow  # noqa: F401 - it trains when it is imported
print(profiler.report())
