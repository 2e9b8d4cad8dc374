"""Cold and warm start of a transformer's training step, beside jax.jit with JAX's own cache.

Run it: python tests/bench/bench_start.py [--pairs N] [--layers N] [--processes N]

A start is from the start of a fresh process to the loss of the first step. Cold: the cache's folder
is empty. Warm: it holds what the cold start left. All sides build the same 12-layer model from the
same NumPy arrays, in plain jax.numpy: forward, backward, Adam. snaprt runs it lazily; the sides in
between are jax.jit with snaprt's cache under it, as it is and with SNAPRT_SPECULATE=1. They take
turns, also at going first.

With --processes N, the start is that of a job: N processes join by `jax.distributed`, the batch is
spread over their devices, and it ends when the last of them has its loss. The parts are of rank 0.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN = time.time()

PROCESSES = 1
LAYERS, WIDTH, HEADS, LENGTH, BATCH, WORDS = 12, 128, 4, 64, 4, 1000
OURS, PLUGIN, PEER = "snaprt", "jax.jit + snaprt", "jax.jit"
SPECULATING = "speculating"
SIDES = (OURS, PLUGIN, SPECULATING, PEER)
PAIRS = 5


def initial_state() -> tuple[Any, Any]:
    """Return parameters with Adam's moments, and one batch, as NumPy arrays."""
    import numpy as np

    random = np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        return (0.02 * random.standard_normal(shape)).astype(np.float32)

    def layer() -> dict[str, Any]:
        return {
            "norm1": np.ones(WIDTH, np.float32),
            "norm2": np.ones(WIDTH, np.float32),
            "qkv": weights(WIDTH, 3 * WIDTH),
            "out": weights(WIDTH, WIDTH),
            "up": weights(WIDTH, 4 * WIDTH),
            "down": weights(4 * WIDTH, WIDTH),
        }

    parameters = {
        "embed": weights(WORDS, WIDTH),
        "place": weights(LENGTH, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": np.ones(WIDTH, np.float32),
        "head": weights(WIDTH, WORDS),
    }
    words = random.integers(0, WORDS, (BATCH, LENGTH + 1)).astype(np.int32)
    return parameters, words


def training_step() -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return ``step(state, words) -> (state, loss)``, written as any user would write it."""
    import jax
    import jax.numpy as jnp

    def normed(x: Any, scale: Any) -> Any:
        return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def attention(x: Any, layer: Any) -> Any:
        q, k, v = jnp.split(x @ layer["qkv"], 3, axis=-1)
        q, k, v = (
            part.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)
            for part in (q, k, v)
        )
        scores = q @ k.transpose(0, 1, 3, 2) / (WIDTH // HEADS) ** 0.5
        visible = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        share = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
        mixed = (share @ v).transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH)
        return mixed @ layer["out"]

    def loss_of(parameters: Any, words: Any) -> Any:
        x = parameters["embed"][words[:, :-1]] + parameters["place"]
        for layer in parameters["layers"]:
            x = x + attention(normed(x, layer["norm1"]), layer)
            x = x + jax.nn.gelu(normed(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
        logits = normed(x, parameters["norm"]) @ parameters["head"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, 1:, None], axis=-1)
        return -jnp.mean(chosen)

    def train_step(state: Any, words: Any) -> tuple[Any, Any]:
        parameters, mean, square, count = state
        loss, slope = jax.value_and_grad(loss_of)(parameters, words)
        count = count + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, slope)
        rate = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        parameters = jax.tree.map(
            lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), parameters, mean, square
        )
        return (parameters, mean, square, count), loss

    return train_step


def child(side: str, address: str, rank: int) -> None:
    """Start once, and print when each part ended and how long its stages took, in seconds."""
    times, stages, hits = CHILDREN[side](address, rank)
    print(json.dumps({"began": BEGAN, **times, "stages": stages, "hits": hits}))


def state_on_device() -> tuple[Any, Any]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    parameters, words = initial_state()
    zeros = jax.tree.map(np.zeros_like, parameters)
    state = parameters, zeros, zeros, np.float32(0)
    if PROCESSES == 1:
        return jax.device_put((state, words))
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def put(array: Any, *axes: str) -> jax.Array:
        placed = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(np.shape(array), placed, lambda part: array[part])

    return jax.tree.map(put, state), put(words, "data")


def import_jax(address: str, rank: int) -> float:
    """Import JAX, join the other processes if there are any, and return the time then."""
    import jax

    if PROCESSES > 1:
        jax.distributed.initialize(address, PROCESSES, rank)
    return time.time()


def start_ours(address: str, rank: int) -> tuple[dict[str, float], dict[str, float], int]:
    """Return the times at which parts ended, the seconds of stages, and the cache's hits."""
    times = {"imported_jax": import_jax(address, rank)}  # timed apart from snaprt
    import snaprt

    times["imported"] = time.time()
    state, words = state_on_device()
    step = training_step()
    times["ready"] = time.time()
    with snaprt.lazy():
        state, loss = step(state, words)
        times["recorded"] = time.time()
        snaprt.mark_step()
        times["stepped"] = time.time()
        times["loss"] = float(loss)
    times["ended"] = time.time()
    stages = {}
    for name in ("LowerTime", "LoadTime", "CompileTime", "ExecuteTime"):
        samples = snaprt.metrics.metric_data(name)
        stages[name] = samples[1] / 1e9 if samples else 0.0
    graphs = snaprt.metrics.metric_data("TensorsGraphSize")
    times["graphs"], times["operations"] = graphs[:2] if graphs else (0, 0)
    return times, stages, snaprt.metrics.counter_value("PersistentCacheHit") or 0


def start_peer(address: str, rank: int) -> tuple[dict[str, float], dict[str, float], int]:
    """Return the same, as JAX's own events tell it."""
    return start_jit(address, rank, plugin=False)


def start_plugin(address: str, rank: int) -> tuple[dict[str, float], dict[str, float], int]:
    """Return the same of jax.jit with snaprt's cache under it."""
    return start_jit(address, rank, plugin=True)


def start_jit(
    address: str, rank: int, *, plugin: bool
) -> tuple[dict[str, float], dict[str, float], int]:
    times = {"imported_jax": import_jax(address, rank)}
    import jax

    if plugin:
        import snaprt

        snaprt.cache.install()
    times["imported"] = time.time()
    stages: dict[str, float] = {}
    events: list[str] = []

    def heard(event: str, duration_secs: float, **_: str | int) -> None:
        stages[event] = stages.get(event, 0.0) + duration_secs

    jax.monitoring.register_event_duration_secs_listener(heard)
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    state, words = state_on_device()
    step = training_step()
    times["ready"] = time.time()
    state, loss = jax.jit(step)(state, words)
    times["stepped"] = time.time()
    times["loss"] = float(loss)
    times["ended"] = time.time()
    return times, stages, events.count("/jax/compilation_cache/cache_hits")


CHILDREN = {OURS: start_ours, PLUGIN: start_plugin, SPECULATING: start_plugin, PEER: start_peer}


def start(side: str, cache: Path, bytecode: Path) -> dict[str, Any]:
    """Start a child and return what it printed, with ``total`` seconds."""
    import measuring

    from snaprt.fleet.launch import free_address

    environment = measuring.clean_environment(bytecode)
    if side != PEER:
        environment["SNAPRT_CACHE_DIR"] = str(cache)
        environment["SNAPRT_SPECULATE"] = str(int(side == SPECULATING))
    else:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        # JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES stays at its default: it matters on GPU alone.
    words = ["--child", side, "--layers", str(LAYERS), "--processes", str(PROCESSES)]
    words += ["--address", free_address()]
    started = time.time()

    def run(rank: int) -> dict[str, Any]:
        return measuring.run_child(__file__, [*words, "--rank", str(rank)], environment)

    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        ranks = list(pool.map(run, range(PROCESSES)))
    found = ranks[0]
    found["total"] = max(one["ended"] for one in ranks) - started
    found["interpreter"] = found["began"] - started
    return found


def parts_of_ours(found: dict[str, Any]) -> dict[str, float]:
    stages = found["stages"]
    parts = {
        "python": found["interpreter"],
        "import jax": found["imported_jax"] - found["began"],
        "import snaprt": found["imported"] - found["imported_jax"],
        "arrays to device": found["ready"] - found["imported"],
        "record": found["recorded"] - found["ready"],
        "lower": stages["LowerTime"],
        "load": stages["LoadTime"],
        "compile": stages["CompileTime"],
        "execute": stages["ExecuteTime"] + found["ended"] - found["stepped"],
    }
    parts["cut, key, cache"] = found["total"] - sum(parts.values())
    return parts


def parts_of_peer(found: dict[str, Any]) -> dict[str, float]:
    stages = found["stages"]
    compiling = stages.get("/jax/core/compile/backend_compile_duration", 0.0)
    loading = stages.get("/jax/compilation_cache/cache_retrieval_time_sec", 0.0)
    parts = {
        "python": found["interpreter"],
        "import jax": found["imported_jax"] - found["began"],
        "import snaprt": found["imported"] - found["imported_jax"],
        "arrays to device": found["ready"] - found["imported"],
        "lower": stages.get("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.0),
        "load": loading,
        "compile": compiling - loading,  # JAX counts a load as a compilation
        "execute": found["ended"] - found["stepped"],
    }
    parts["trace, key, cache"] = found["total"] - sum(parts.values())
    return parts


def show(found: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    import measuring

    def middle(side: str, kind: str) -> float:
        return measuring.median([one["total"] for one in found[side, kind]])

    print("Seconds from the start of the process to the first loss, min/median:\n")
    rows = []
    for kind in ("cold", "warm"):
        cells = [
            f"{min(one['total'] for one in found[side, kind]):.2f}/{middle(side, kind):.2f}"
            for side in SIDES
        ]
        ratios = [middle(side, kind) / middle(PEER, kind) for side in SIDES[:-1]]
        rows.append([kind, *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    heads = [f"{side} : {PEER}" for side in SIDES[:-1]]
    measuring.show_table(["start", *SIDES, *heads], rows)
    for side in SIDES:
        split = parts_of_ours if side == OURS else parts_of_peer
        columns = [[split(one) for one in found[side, kind]] for kind in ("cold", "warm")]
        print()
        measuring.show_table(
            [f"{side}, median s", "cold", "warm"],
            [
                [
                    name,
                    *(f"{measuring.median([one[name] for one in runs]):.3f}" for runs in columns),
                ]
                for name in columns[0][0]
            ],
        )
    first = found[OURS, "cold"][0]
    print(f"\n{OURS} ran {first['graphs']} graph(s) of {first['operations']:.0f} operations.")


def main() -> None:
    global LAYERS, PROCESSES
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"how many (default {PAIRS})")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"how many (default {LAYERS})")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="how many (default 1)")
    for name, kind in (("--child", str), ("--address", str), ("--rank", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    LAYERS, PROCESSES = arguments.layers, arguments.processes
    if arguments.child:
        child(arguments.child, arguments.address, arguments.rank)
        return
    import measuring

    print(measuring.machine())
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bytecode = Path(folder, "bytecode")
        for side in SIDES:  # these leave the compiled Python modules
            start(side, Path(folder, f"first-{side}"), bytecode)
        for pair in range(arguments.pairs):
            first = pair % len(SIDES)
            sides = SIDES[first:] + SIDES[:first]
            for kind in ("cold", "warm"):
                for side in sides:
                    one = start(side, Path(folder, f"{pair}-{side}"), bytecode)
                    compiles_for_all = kind == "cold" and PROCESSES > 1  # one rank, the others hit
                    if not compiles_for_all and (one["hits"] > 0) != (kind == "warm"):
                        raise SystemExit(f"a {kind} start of {side} hit its cache {one['hits']} x")
                    found.setdefault((side, kind), []).append(one)
                    print(f"{kind} {side}: {one['total']:.2f} s", file=sys.stderr, flush=True)
    losses = {one["loss"] for runs in found.values() for one in runs}
    print(f"Losses: {', '.join(map(str, sorted(losses)))}\n")
    show(found)


if __name__ == "__main__":
    main()
