"""A class that trains a small residual network with a compiled step, on the same batch."""

import itertools

import torch
import torch.nn as nn
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(x + self.norm(self.conv(x)))


class Trainer:
    def __init__(self):
        torch_xla.manual_seed(11)
        self.device = torch_xla.device()
        batch = (torch.randn(4, 3, 8, 8), torch.arange(4))
        loader = xu.SampleGenerator(data=batch, sample_count=100 // xr.world_size())
        self.loader = pl.MpDeviceLoader(loader, self.device)
        self.model = nn.Sequential(
            nn.Conv2d(3, 6, 3), Block(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
        ).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, weight_decay=1e-4)
        self.loss_fn = nn.CrossEntropyLoss()
        self.compiled_step = torch_xla.compile(self.step, full_graph=True, name="step")

    def step(self, data, target):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(data), target)
        loss.backward()
        self.optimizer.step()
        return loss

    def show(self, step, loss, tracker):
        assert tracker.rate() > 0
        print(f"loss {loss:.9g}")
        assert not torch.isnan(loss).item()

    def train(self, steps):
        tracker = xm.RateTracker()
        self.model.train()
        for step, (data, target) in enumerate(itertools.islice(self.loader, steps)):
            loss = self.compiled_step(data, target)
            tracker.add(4)
            xm.add_step_closure(self.show, args=(step, loss, tracker))
        torch_xla.sync()
        xm.wait_device_ops()


if __name__ == "__main__":
    Trainer().train(4)
