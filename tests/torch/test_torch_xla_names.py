"""The names of PyTorch/XLA in `snaprt.torch.xla`, and the device ``xla``."""

from __future__ import annotations

import copy
import io
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import SNAPRT, run_program
from torch import nn

import snaprt
import snaprt.torch
import snaprt.torch.xla as xla
from snaprt.errors import UsageError
from snaprt.torch.xla import processes

# What the examples and the MNIST and ImageNet tests of PyTorch/XLA use.
USED = """
    torch_xla: device devices device_count real_devices sync step compile launch manual_seed
    torch_xla.core.xla_model: xla_device xla_device_hw mark_step optimizer_step add_step_closure
    torch_xla.core.xla_model: master_print is_master_ordinal get_ordinal xrt_world_size save unlazy
    torch_xla.core.xla_model: rendezvous mesh_reduce all_reduce all_gather REDUCE_SUM RateTracker
    torch_xla.core.xla_model: broadcast_master_param wait_device_ops get_memory_info do_on_ordinals
    torch_xla.core.xla_model: set_rng_state get_rng_state get_xla_supported_devices reduce_gradients
    torch_xla.runtime: world_size global_ordinal local_ordinal process_index process_count
    torch_xla.runtime: device_type initialize_cache is_spmd use_spmd global_runtime_device_count
    torch_xla.debug.metrics: metrics_report short_metrics_report counter_names counter_value
    torch_xla.debug.metrics: metric_names metric_data clear_all executed_fallback_ops
    torch_xla.debug.profiler: start_server start_trace stop_trace Trace StepTrace trace_detached
    torch_xla.distributed.parallel_loader: MpDeviceLoader ParallelLoader
    torch_xla.distributed.xla_multiprocessing: spawn MpModelWrapper MpSerialExecutor
    torch_xla.distributed.spmd: Mesh mark_sharding ShardingSpec
    torch_xla.distributed.fsdp: XlaFullyShardedDataParallel
    torch_xla.utils.utils: SampleGenerator
    torch_xla.utils.serialization: save load
    torch_xla.test.test_utils: print_training_update print_test_update now get_summary_writer
    torch_xla.test.test_utils: write_to_summary close_summary_writer
    torch_xla.amp: autocast GradScaler
    torch_xla.amp.syncfree: SGD Adam AdamW
    torch_xla.experimental: eager_mode
    torch_xla.experimental.scan: scan
    torch_xla.experimental.scan_layers: scan_layers
    torch_xla.experimental.assume_pure: assume_pure
    torch_xla.utils.checkpoint: checkpoint CheckpointFunction
    torch_xla.backends: set_mat_mul_precision
    torch_xla._XLAC: _xla_metrics_report _xla_get_tensor_id
    torch_xla.core.xla_model: set_replication collective_broadcast
    torch_xla.core.xla_model: _fetch_gradients _maybe_convert_to_cpu
"""


def _run(
    program: str, folder: Path, *options: str, status: int | None = 0, **variables: str
) -> tuple[str, str]:
    """Run a program under ``snaprt run --torch`` and return what it printed."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    command = (*SNAPRT, "run", "--torch", *options, "--", "program.py")
    ended = run_program(command, folder=folder, status=status, **variables)
    return ended.stdout, ended.stderr


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_a_moved_module_is_wrapped_and_a_plain_one_again_when_moved_back(model) -> None:
    with torch.no_grad():
        expected = model(torch.ones(1, 3))
    first = model[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    moved = model.to(xla.device())
    assert moved is model
    shown = model(torch.ones(1, 3))
    assert shown.device == xla.device()
    assert "_snaprt_calls" in vars(model)
    torch.testing.assert_close(shown.detach().cpu(), expected)
    shown.sum().backward()
    optimizer.step()
    assert model.cpu() is model
    assert type(model) is nn.Sequential
    assert model[0] is first
    assert type(model(torch.ones(1, 3))) is torch.Tensor
    assert optimizer.param_groups[0]["params"][0] is first.weight


def test_a_module_is_moved_with_its_dtype_or_after_a_tensor(model) -> None:
    x = torch.ones(1, 3, dtype=torch.bfloat16).to(xla.device())
    assert model.to(x)(x).dtype == torch.bfloat16
    other = nn.Linear(3, 2).to(device=xla.device(), dtype=torch.float16)
    assert other.weight.dtype == torch.float16
    assert other.to(torch.float32).weight.device == xla.device()
    assert type(other.to("cpu").weight) is nn.Parameter


def test_a_module_can_be_made_on_the_device() -> None:
    made = nn.GRU(2, 3, device=xla.device())
    assert {parameter.device for parameter in made.parameters()} == {xla.device()}
    assert made.weight_ih_l0.abs().max().item() > 0


def test_a_step_closure_sees_tensors_as_they_were_and_other_arguments_as_they_are() -> None:
    seen: list[object] = []
    total = torch.zeros(2, device=xla.device())
    notes: list[str] = []

    def show(values: dict[str, torch.Tensor], notes: list[str]) -> None:
        notes.append("called")
        seen.append(values["total"].tolist())

    with snaprt.torch.lazy():
        total += 1
        xla.add_step_closure(show, args=({"total": total}, notes))
        total += 1
        xla.mark_step()
        assert (seen, notes) == ([[1.0, 1.0]], ["called"])
        xla.sync()
    assert total.tolist() == [2.0, 2.0]
    assert len(seen) == 1


def test_a_loader_moves_batches_of_any_structure_and_marks_steps() -> None:
    batches = [{"x": torch.full((2,), float(i)), "name": str(i)} for i in range(5)]
    loader = xla.MpDeviceLoader(batches, xla.device(), batches_per_execution=2, prefetch=9)
    assert len(loader) == 5
    marked = []
    with snaprt.torch.lazy():
        for batch in loader:
            assert batch["x"].device == xla.device()
            marked.append(snaprt.metrics.counter_value("MarkStep") or 0)
    assert [count - marked[0] for count in marked] == [0, 0, 1, 1, 2]
    assert snaprt.metrics.counter_value("MarkStep") == marked[0] + 3
    with pytest.raises(UsageError, match="input_sharding"):
        xla.MpDeviceLoader(batches, xla.device(), input_sharding="x")


def test_one_process_has_what_all_have() -> None:
    x = torch.arange(3.0).to(xla.device())
    assert xla.all_reduce(xla.REDUCE_SUM, x, scale=0.5).tolist() == [0.0, 0.5, 1.0]
    tensors = [x.clone(), x.clone()]
    assert xla.all_reduce("sum", tensors, scale=2.0) is None
    assert tensors[1].tolist() == [0.0, 2.0, 4.0]
    assert xla.mesh_reduce("n", 3, sum) == 3
    assert xla.rendezvous("r", b"p") == [b"p"]
    assert (xla.world_size(), xla.get_ordinal()) == (1, 0)
    called: list[int] = []
    xla.spawn(lambda index, n: called.append(index + n), args=(5,), nprocs=1)
    xla.launch(called.append)
    assert called == [5, 0]
    with pytest.raises(UsageError, match="one process"):
        xla.spawn(print, nprocs=8)


def test_one_of_several_processes_is_told_that_gradients_are_not_added(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    for call in (
        lambda: xla.optimizer_step(optimizer),
        xla.world_size,
        lambda: xla.launch(print),
        lambda: xla.all_reduce("sum", torch.ones(1)),
    ):
        with pytest.raises(UsageError, match="rank 1 of 4"):
            call()


def test_a_compiled_step_is_one_graph_and_reading_inside_a_full_one_is_an_error() -> None:
    x = torch.ones(4, device=xla.device())
    with snaprt.torch.lazy():
        xla.eager_mode(True)
        assert xla.compile(lambda x: (x * 2).sum())(x).item() == 8
        assert xla.is_eager_mode()
        xla.eager_mode(False)
    full = xla.compile(lambda x: (x * 2).sum().item(), full_graph=True)
    with pytest.raises(snaprt.GraphBreakError):
        full(x)
    with pytest.raises(UsageError, match="custom_compile_options"):
        xla.compile(custom_compile_options={"a": 1})


@pytest.mark.parametrize("name", ["mark_sharding", "all_to_all", "get_stablehlo", "fori_loop"])
def test_a_name_without_counterpart_says_what_to_use_when_it_is_called(name) -> None:
    stand_in = getattr(xla, name)
    with pytest.raises(UsageError, match=f"no {name}") as raised:
        stand_in(1, 2)
    assert "hint" in str(raised.value)


def test_there_is_one_device() -> None:
    with pytest.raises(UsageError, match="no device xla:3"):
        xla.device(3)


@pytest.mark.parametrize(
    "kind", [nn.parallel.DistributedDataParallel, nn.DataParallel], ids=["distributed", "threads"]
)
def test_what_would_copy_a_module_calls_it(kind, model, monkeypatch) -> None:
    plain = copy.deepcopy(model)
    copies = kind(model.to(xla.device()))
    assert isinstance(copies, kind)
    assert copies.module is model
    assert [*copies.state_dict()] == [f"module.{name}" for name in plain.state_dict()]
    x = torch.ones(2, 3)
    copies(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad.cpu(), plain[0].weight.grad)
    with copies.no_sync(), pytest.raises(UsageError, match="would call the hook"):
        copies.register_comm_hook(None, print)
    assert type(nn.DataParallel(plain)) is nn.DataParallel
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="rank 1 of 4"):
        kind(model)


def test_libraries_ask_for_gradients_copies_and_numbers_of_tensors(model) -> None:
    model.to(xla.device())
    optimizer = torch.optim.SGD(model.parameters())
    model[0](torch.ones(1, 3)).sum().backward()
    gradients = xla.fetch_gradients(optimizer)
    xla.all_reduce("sum", gradients, scale=0.5)
    assert model[0].bias.grad.tolist() == [0.5] * 4
    assert len(gradients) == 2
    copied = xla.convert_to_cpu([{"x": gradients[1]}])
    assert copied[0]["x"].device.type == "cpu"
    assert len({xla.get_tensor_id(each) for each in model.parameters()}) == 4
    xla.set_replication(xla.device(), xla.get_xla_supported_devices())
    xla.collective_broadcast([gradients[0]])
    with pytest.raises(UsageError, match="2 devices"):
        xla.set_replication(xla.device(), ["xla:0", "xla:1"])
    with pytest.raises(UsageError, match="no process 1"):
        xla.collective_broadcast([gradients[0]], root_ordinal=1)


def test_a_profile_of_a_time_ends_by_itself_or_with_the_program(tmp_path: Path) -> None:
    program = """
        import sys, time
        import torch_xla, torch
        import torch_xla.debug.profiler as xp
        xp.trace_detached("localhost:9012", "profile", duration_ms=int(sys.argv[1]))
        (torch.ones(3, device=torch_xla.device()) + 1).tolist()
        time.sleep(float(sys.argv[2]))
        try:
            xp.trace_detached("elsewhere:9012", "other")
        except Exception as error:
            print("this program, and not" in str(error))
    """
    for arguments in (("50", "1"), ("60000", "0")):
        folder = tmp_path / arguments[0]
        folder.mkdir()
        (folder / "program.py").write_text(textwrap.dedent(program))
        command = (*SNAPRT, "run", "--torch", "--", "program.py", *arguments)
        assert run_program(command, folder=folder).stdout == "True\n"
        assert [*(folder / "profile").rglob("*.xplane.pb")]


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_collectives_of_a_group_of_one_give_what_they_were_given(device) -> None:
    processes.register_process_group()
    dist.init_process_group("xla", init_method="xla://")
    try:
        x = torch.arange(2.0, device=device)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        assert x.tolist() == [0.0, 1.0]
        gathered = [torch.zeros(2, device=device)]
        dist.all_gather(gathered, x)
        scattered = torch.zeros(2, device=device)
        dist.scatter(scattered, [x])
        exchanged = torch.zeros(2, device=device)
        work = dist.all_to_all_single(exchanged, x, async_op=True)
        assert work is not None
        assert work.wait()
        dist.barrier()
        objects = [None]
        dist.all_gather_object(objects, "all")
        assert (gathered[0].tolist(), scattered.tolist()) == ([0.0, 1.0], [0.0, 1.0])
        assert (exchanged.tolist(), objects) == ([0.0, 1.0], ["all"])
    finally:
        dist.destroy_process_group()


def test_a_scan_is_a_loop_that_writes_to_none_of_its_operands() -> None:
    def add(total, x):
        total += x["value"]
        x["value"].zero_()
        return total, {"total": total, "twice": 2 * total, "none": None}

    first: Any = torch.ones(2).to(xla.device()).requires_grad_()
    values = torch.arange(6.0).reshape(3, 2).to(xla.device())
    last, each = xla.scan(add, first * 1, {"value": values}, is_fn_pure=True)
    assert last.tolist() == [7.0, 10.0]
    assert each["total"].tolist() == [[1.0, 2.0], [3.0, 5.0], [7.0, 10.0]]
    assert each["twice"].tolist() == [[2.0, 4.0], [6.0, 10.0], [14.0, 20.0]]
    assert each["none"] is None
    assert values.sum().item() == 15
    (last.sum() + each["twice"].sum()).backward()
    assert first.grad.tolist() == [7.0, 7.0]
    with pytest.raises(UsageError, match=r"the lengths \[2, 3\]"):
        xla.scan(add, first, {"value": values, "other": values[:2]})


def test_scanned_layers_are_called_one_after_the_other_in_a_wrapped_module() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            return xla.scan_layers(self.layers, xla.checkpoint(torch.sin, x))

    model = Layers()
    x = torch.linspace(-1, 1, 3)
    ours = copy.deepcopy(model).to(xla.device())
    expected = model(x)
    expected.sum().backward()
    shown = xla.assume_pure(ours)(x)
    torch.testing.assert_close(shown.detach().cpu(), expected.detach())
    shown.sum().backward()
    gradients = ([p.grad for p in each.parameters()] for each in (ours.cpu(), model))
    torch.testing.assert_close(*gradients)


def test_a_saved_file_is_plain_and_loads_for_the_device(model) -> None:
    file = io.BytesIO()
    xla.save(model.to(xla.device()).state_dict(), file)
    for where in ("cpu", "xla", "xla:0", torch.device("jax")):
        file.seek(0)
        loaded = torch.load(file, map_location=where, weights_only=True)
        assert type(loaded["0.weight"]) is torch.Tensor
        model.load_state_dict(loaded)


def test_a_thread_is_lazy_from_its_first_device_on(tmp_path: Path) -> None:
    program = """
        import snaprt
        import snaprt.torch.xla as xm
        from snaprt.trace.array import LazyArray
        import snaprt.torch, torch
        x = torch.ones(2, device=snaprt.torch.device()) + 1
        print(type(snaprt.torch.to_jax(x)) is LazyArray)
        y = torch.ones(2, device=xm.xla_device()) + 1
        print(type(snaprt.torch.to_jax(y)) is LazyArray)
    """
    assert run_program(program, folder=tmp_path).stdout.split() == ["False", "True"]


@pytest.mark.slow
def test_names_and_devices_of_an_unmodified_program(tmp_path: Path) -> None:
    program = f"""
        import importlib
        import torch
        import torch.nn as nn

        for line in {USED!r}.strip().splitlines():
            module, names = line.strip().split(": ")
            for name in names.split():
                assert callable(getattr(importlib.import_module(module), name)) or name.isupper()

        import torch_xla
        assert torch_xla.core.xla_model.xla_device() == torch_xla.device()
        assert not hasattr(torch_xla, "not_there")
        try:
            import torch_xla.not_there
        except ImportError:
            pass
        else:
            raise AssertionError

        device = torch_xla.device()
        x = torch.ones(2, 3, device="xla")
        made = [
            x.to("xla"), torch.tensor(1.0, device="xla"), torch.as_tensor([1], device="xla:0"),
            torch.randn(2, device=torch.device("xla")),
            torch.zeros_like(torch.ones(1), device="xla"),
            torch.ones(1).new_zeros(2, device="xla"), torch.ones(2).to(device="xla", copy=True),
        ]
        torch.set_default_device("xla")
        made.append(torch.ones(2))
        torch.set_default_device("cpu")
        with torch.device("xla"):
            made.append(nn.Linear(3, 2).weight)
        assert all(tensor.device == device for tensor in made)
        try:
            x.to("xla:1")
        except Exception as error:
            assert "no device xla:1" in str(error)
        else:
            raise AssertionError

        layer = nn.Linear(3, 2).to("xla")
        optim = torch.optim
        alike = (optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.AdamW)
        kinds = [(optim.AdamW, {{"fused": True}}), (optim.RMSprop, {{}}), (optim.Rprop, {{}})]
        for kind, options in [*kinds, *((k, {{"foreach": e}}) for k in alike for e in (0, 1))]:
            before = layer.weight.tolist()
            layer(x).sum().backward()
            kind(layer.parameters(), **options).step()
            assert layer.weight.tolist() != before
        for scope in (torch.autocast("xla", dtype=torch.bfloat16), torch_xla.amp.autocast(device)):
            with scope:
                assert layer(x).dtype == torch.bfloat16

        from torch_xla.utils.checkpoint import checkpoint
        w = torch.ones(3, device="xla", requires_grad=True)
        for call in (lambda: checkpoint(torch.square, w), lambda: checkpoint(layer, w),
                     lambda: checkpoint(torch.square, w, use_reentrant=False)):
            w.grad = None
            with torch.autocast("xla"):
                call().sum().backward()
            assert w.grad.abs().min() > 0

        import torch.distributed as dist
        dist.init_process_group("xla", init_method="xla://")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        dist.destroy_process_group()
        print("all there")
    """
    stdout, stderr = _run(program, tmp_path, "--lazy")
    assert stdout == "all there\n"
    assert "operation by operation" not in stderr


@pytest.mark.parametrize(("options", "is_lazy"), [((), "True"), (("--no-lazy",), "False")])
def test_a_program_runs_lazily_unless_it_is_not_to(options, is_lazy, tmp_path: Path) -> None:
    program = """
        import torch
        import torch_xla
        from snaprt.trace.array import LazyArray
        x = torch.ones(2, device=torch_xla.device()) + 1
        print(type(x.box.array) is LazyArray, x.tolist())
    """
    stdout, _ = _run(program, tmp_path, *options)
    assert stdout == f"{is_lazy} [2.0, 2.0]\n"


def test_an_installed_torch_xla_is_named_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("raise ImportError('the other one')")
    information = tmp_path / "torch_xla-2.9.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n"
    )
    program = "import torch_xla\nprint(torch_xla.device())"
    stdout, stderr = _run(program, tmp_path, PYTHONPATH=str(tmp_path))
    assert stdout == "xla:0\n"
    assert "not the installed torch_xla 2.9.0" in stderr


def test_without_pytorch_the_error_says_what_to_install(tmp_path: Path) -> None:
    program = """
        import importlib.metadata as metadata
        from snaprt.cli.main import main

        def version(name, known=metadata.version):
            if name in ("torch", "torchax"):
                raise metadata.PackageNotFoundError(name)
            return known(name)

        metadata.version = version
        raise SystemExit(main(["run", "--lazy", "--torch", "--", "train.py"]))
    """
    ended = run_program(program, folder=tmp_path, status=2)
    assert "snaprt.torch needs torch and torchax" in ended.stderr
    assert "pip install 'snaprt[torch]'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_nan_is_recorded_replayed_and_localized_in_an_unmodified_program(tmp_path: Path) -> None:
    program = """
        import torch
        import torch.nn as nn
        import torch_xla.core.xla_model as xm

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(4, 4)
                self.second = nn.Linear(4, 1)

            def forward(self, x):
                hidden = torch.log(self.first(x) - 1000.0)
                return self.second(hidden)

        device = xm.xla_device()
        model = Model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(2, 4, device=device)).mean()
        loss.backward()
        xm.optimizer_step(optimizer, barrier=True)
        print(loss.item())
    """
    stdout, _ = _run(program, tmp_path, "--lazy", "--when", "nan", "--dump", "dump")
    assert stdout == "nan\n"
    replayed = run_program((*SNAPRT, "replay", "dump"), folder=tmp_path)
    assert "bit" in replayed.stdout
    (snapshot, *_) = sorted((tmp_path / "dump").rglob("*.inputs.snap"))
    found = run_program((*SNAPRT, "localize", str(snapshot)), folder=tmp_path, status=None)
    assert "program.py:13" in found.stdout


def test_an_eager_program_is_recorded_call_by_call_and_replayed(tmp_path: Path) -> None:
    program = """
        import torch
        import torch.nn as nn
        import torch_xla.core.xla_model as xm

        model = nn.Linear(3, 2).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 3, device="xla")).sum().backward()
            xm.optimizer_step(optimizer, barrier=True)
    """
    options = ("--no-lazy", "--record", "--when", "execution=2", "--dump", "dump")
    _run(program, tmp_path, *options)
    recorded = {path.name.partition(".")[0] for path in (tmp_path / "dump").iterdir()}
    assert {"torch_Linear", "torch_Linear_backward", "torch_SGD_step"} <= recorded
    replayed = run_program((*SNAPRT, "replay", "dump"), folder=tmp_path).stdout
    assert replayed.count("all identical") == len(recorded)
