"""What counting costs; run it: python tests/bench/bench_metrics.py."""

from __future__ import annotations

import timeit

from snaprt import metrics

REPEATS = 7
CALLS = 200_000
LIMITS_NS = {
    "metrics.counter_add('MarkStep')": 200,
    "metrics.metric_add('ExecuteTime', 1.0)": 1000,
}


def main() -> None:
    for statement, limit in LIMITS_NS.items():
        seconds = timeit.repeat(
            statement, globals={"metrics": metrics}, number=CALLS, repeat=REPEATS
        )
        print(f"{statement:40} {1e9 * min(seconds) / CALLS:6.0f} ns (limit {limit} ns)")


if __name__ == "__main__":
    main()
