import json
import os
import re
from pathlib import Path

import pytest
from programs import run_program
from threads import in_thread, in_threads

from snaprt import metrics
from snaprt.errors import SnaprtError, UsageError
from snaprt.metrics import Metric, Metrics

SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def _nothing_counted():
    metrics.clear_all()
    yield
    metrics.clear_all()


def report_of(name: str, kind: str, values: list[float], seconds: float = 1.0) -> str:
    step = int(seconds * SECOND / max(len(values) - 1, 1))
    samples = tuple((number * step, value) for number, value in enumerate(values))
    metric = Metric(kind, len(values), sum(values), samples)
    return metrics.metrics_report(Metrics({name: metric}, {}))


def test_the_report_has_pytorch_xlas_format():
    # The sample of PyTorch/XLA's troubleshooting page, with the samples that it implies.
    values = [127_276_604, 447_178_907, 483_331_700, 517_263_239, 537_154_054]
    metric = Metric(
        "time",
        5,
        2_112_204_518,
        tuple((int(number * 5 / 0.821001 / 4 * 1e9), v) for number, v in enumerate(values)),
    )
    report = metrics.metrics_report(Metrics({"CompileTime": metric}, {"CachedCompile": 521}))
    assert report == (
        "Metric: CompileTime\n"
        "  TotalSamples: 5\n"
        "  Accumulator: 02s112ms204.518us\n"
        "  ValueRate: 346ms824.402us / second\n"
        "  Rate: 0.821001 / second\n"
        "  Percentiles: 1%=127ms276.604us; 5%=127ms276.604us; 10%=127ms276.604us;"
        " 20%=447ms178.907us; 50%=483ms331.700us; 80%=537ms154.054us; 90%=537ms154.054us;"
        " 95%=537ms154.054us; 99%=537ms154.054us\n"
        "Counter: CachedCompile\n"
        "  Value: 521\n"
    )


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("time", 0, "000.000us"),
        ("time", 1, "000.001us"),
        ("time", 999_999, "999.999us"),
        ("time", 1_000_000, "001ms000.000us"),
        ("time", 2_600_000_000, "02s600ms000.000us"),
        ("time", 90_061_001_002_003, "01d01h01m01s001ms002.003us"),
        ("time", float("nan"), "nanus"),
        ("seconds", 1.5, "01s500ms000.000us"),
        ("bytes", 0, "0.00B"),
        ("bytes", 1023, "1023.00B"),
        ("bytes", 1_289_748, "1.23MB"),
        ("bytes", 2**62, "4096.00PB"),
        ("plain", 3, "3.00"),
    ],
)
def test_a_value_is_shown_in_the_unit_of_its_kind(kind, value, shown):
    assert f"  Accumulator: {shown}\n" in report_of("M", kind, [value])


def test_one_sample_has_percentiles_but_no_rate():
    report = report_of("M", "plain", [7])
    assert "Rate" not in report
    assert "1%=7.00" in report


def test_rates_are_taken_over_the_time_that_the_kept_samples_span():
    report = report_of("InboundData", "bytes", [1024, 1024, 2048], seconds=2)
    assert "  ValueRate: 2.00KB / second\n" in report
    assert "  Rate: 1.5 / second\n" in report


def test_percentiles_are_samples_in_order_of_size():
    report = report_of("M", "plain", list(range(199, -1, -1)))
    assert (
        "Percentiles: 1%=2.00; 5%=10.00; 10%=20.00; 20%=40.00; 50%=100.00; 80%=160.00; "
        "90%=180.00; 95%=190.00; 99%=198.00"
    ) in report


def test_a_metric_counts_all_samples_and_keeps_the_latest():
    for value in range(metrics.KEPT_SAMPLES + 10):
        metrics.metric_add("TensorsGraphSize", value)
    total, accumulator, samples = metrics.metric_data("TensorsGraphSize")
    assert total == metrics.KEPT_SAMPLES + 10
    assert accumulator == sum(range(total))
    assert [value for _, value in samples] == list(range(10, total))
    assert sorted(when for when, _ in samples) == [when for when, _ in samples]


def test_names_and_values_can_be_asked_for():
    metrics.counter_add("MarkStep")
    metrics.counter_add("MarkStep", 4)
    metrics.metric_add("CompileTime", 5)
    assert metrics.counter_names() == ["MarkStep"]
    assert metrics.counter_value("MarkStep") == 5
    assert metrics.counter_value("Unknown") is None
    assert metrics.metric_names() == ["CompileTime"]
    assert metrics.metric_data("Unknown") is None


def test_clear_all_forgets_everything():
    metrics.counter_add("MarkStep")
    metrics.metric_add("CompileTime", 5)
    metrics.clear_all()
    assert metrics.metrics_report() == ""


def test_a_timed_block_adds_nanoseconds_even_when_it_raises():
    with pytest.raises(ZeroDivisionError), metrics.timed("ExecuteTime"):
        _ = 1 / 0
    total, nanoseconds, _ = metrics.metric_data("ExecuteTime")
    assert total == 1
    assert 0 < nanoseconds < SECOND


def test_counts_of_many_threads_add_up_exactly():
    def count(_: int) -> None:
        for _ in range(100_000):
            metrics.counter_add("CachedCompile")

    in_threads(8, count)
    assert metrics.counter_value("CachedCompile") == 800_000


def test_counts_of_ended_threads_are_kept_without_keeping_the_threads():
    for _ in range(50):
        in_thread(metrics.counter_add, "MarkStep")
    assert metrics.counter_value("MarkStep") == 50
    assert len(metrics._thread_counts) < 10


def test_samples_of_many_threads_add_up_exactly():
    def add(_: int) -> None:
        for _ in range(5_000):
            metrics.metric_add("OutboundData", 2)

    in_threads(8, add)
    assert metrics.metric_data("OutboundData")[:2] == (40_000, 80_000)


def test_the_short_report_shows_the_chosen_names_and_every_host_read():
    for name in ("CachedCompile", "MyCounter", "host::bool"):
        metrics.counter_add(name)
    for name in ("CompileTime", "MyMetric"):
        metrics.metric_add(name, 1)

    def shown(report: str) -> list[str]:
        return re.findall(r"^(?:Metric|Counter): (.*)$", report, re.MULTILINE)

    assert shown(metrics.short_metrics_report()) == ["CompileTime", "CachedCompile", "host::bool"]
    assert shown(
        metrics.short_metrics_report(counter_names=["MyCounter"], metric_names=["MyMetric"])
    ) == ["MyMetric", "MyCounter", "host::bool"]


def test_saved_metrics_are_read_back_equal(tmp_path: Path):
    metrics.metric_add("CompileTime", 12.5)
    metrics.counter_add("MarkStep")
    metrics.save(tmp_path / "run.json")
    assert metrics.load(tmp_path / "run.json") == metrics.current()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_metrics_saved_as_text_are_the_report(tmp_path: Path):
    metrics.counter_add("MarkStep")
    metrics.save(tmp_path / "run.txt")
    assert (tmp_path / "run.txt").read_text() == metrics.metrics_report()


def test_metrics_that_cannot_be_saved_name_the_file(tmp_path: Path):
    with pytest.raises(SnaprtError, match=r"missing.run\.json"):
        metrics.save(tmp_path / "missing" / "run.json")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a snaprt metrics file"),
        (b"\xff\xfe\x00", "not a snaprt metrics file"),
        (b'{"schema": "else"}', "not a snaprt metrics file"),
        (b'{"schema": "snaprt.metrics", "version": 99}', "format version 99"),
        (b'{"schema": "snaprt.metrics", "version": 1}', "damaged"),
        (
            b'{"schema": "snaprt.metrics", "version": 1, "metrics": {}, "counters": {"A": 1e999}}',
            "damaged",
        ),
        (
            b'{"schema": "snaprt.metrics", "version": 1, "metrics": {"A": 1}, "counters": {}}',
            "damaged",
        ),
        (
            b'{"schema": "snaprt.metrics", "version": 1, "counters": {}, "metrics": {"A": '
            b'{"kind": "?", "total_samples": 1, "accumulator": 1, "samples": []}}}',
            "unknown kind",
        ),
    ],
)
def test_a_file_that_is_not_metrics_is_refused_by_name(tmp_path: Path, content, complaint):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=complaint) as caught:
        metrics.load(path)
    assert str(path) in caught.value.message


def test_the_metrics_file_is_written_when_the_process_ends(tmp_path: Path):
    path = tmp_path / "run.json"
    program = "from snaprt import metrics; metrics.counter_add('MarkStep', 3); raise SystemExit(4)"
    run_program(program, status=4, SNAPRT_METRICS_FILE=path)
    assert json.loads(path.read_text())["counters"] == {"MarkStep": 3}


def test_a_process_that_counted_nothing_leaves_the_metrics_file_of_another(tmp_path: Path):
    path = tmp_path / "run.json"
    run_program("import snaprt", SNAPRT_METRICS_FILE=path)
    assert json.loads(path.read_text())["counters"] == {}
    counting = "from snaprt import metrics; metrics.counter_add('MarkStep', 3)"
    run_program(counting, SNAPRT_METRICS_FILE=path)
    run_program("import snaprt", SNAPRT_METRICS_FILE=path)
    assert json.loads(path.read_text())["counters"] == {"MarkStep": 3}


@pytest.mark.parametrize("name", ["no/run", "x" * 300])
def test_a_metrics_file_that_cannot_be_written_leaves_the_exit_status(tmp_path: Path, name: str):
    done = run_program("import snaprt.metrics", SNAPRT_METRICS_FILE=tmp_path / name)
    assert "cannot write the metrics to" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_metrics_are_written_to_a_pipe_and_do_not_take_its_place(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    metrics.counter_add("MarkStep", 3)
    metrics.save(pipe)
    assert json.loads(os.read(reader, 1 << 16))["counters"]["MarkStep"] == 3
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_another_thread_adds_can_add_too():
    run_program(
        """
import os, threading
from snaprt import metrics
stop = threading.Event()
def add():
    while not stop.is_set():
        metrics.metric_add("ExecuteTime", 1)
thread = threading.Thread(target=add)
thread.start()
for _ in range(30):
    child = os.fork()
    if child == 0:
        metrics.metric_add("ExecuteTime", 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
thread.join()
"""
    )


def test_a_counter_of_finalizers_counts_exactly_and_can_be_cleared():
    class Counted:
        __del__ = metrics.FinalizerCounter("Gone").add

    for number in (3, 2):
        metrics.clear_all()
        assert metrics.counter_value("Gone") is None
        things = [Counted() for _ in range(number)]
        things.clear()
        assert metrics.counter_value("Gone") == metrics.counter_value("Gone") == number


def test_earlier_names_of_pytorch_xla_give_the_same_values():
    metrics.counter_add("CachedCompile", 3)
    metrics.metric_add("TransferFromDeviceTime", 7)
    assert metrics.counter_value("CachedSyncTensors") == 3
    assert metrics.counter_value("UncachedSyncTensors") is None
    assert metrics.metric_data("TransferFromServerTime") == metrics.metric_data(
        "TransferFromDeviceTime"
    )
    assert metrics.metric_data("TransferToServerTime") is None
    assert "CachedSyncTensors" not in metrics.counter_names()  # each is reported once
