"""The device, as programs ask for it: by its type, in threads, in spawned processes."""

import threading

import torch
import torch.multiprocessing as mp
import torch_xla.core.xla_model as xm


def compute(name):
    device = xm.xla_device()
    x = torch.ones(2, device=device) + torch.tensor([1.0, 2.0], device="xla")
    y = torch.zeros(2, device=x.device).to("xla") + x
    assert x.new_tensor([1]).device == y.device == device, (x.device, y.device)
    print(name, x.device.type, device, xm.is_xla_tensor(y), y.cpu().tolist(), flush=True)


def in_process(rank):
    compute(f"process {rank}")


if __name__ == "__main__":
    compute("main")
    thread = threading.Thread(target=compute, args=("thread",))
    thread.start()
    thread.join()
    mp.spawn(in_process, nprocs=1)
