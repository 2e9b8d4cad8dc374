"""A CNN on digits, in the style of a job of several processes."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
import torch_xla.test.test_utils as test_utils

FLAGS = {"batch_size": 8, "lr": 0.02, "epochs": 2, "seed": 3}


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=3)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, kernel_size=3)
        self.fc = nn.Linear(24, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.bn1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


def loaders(flags):
    generator = torch.Generator().manual_seed(flags["seed"])
    images = torch.randn(32, 1, 14, 14, generator=generator)
    labels = torch.randint(0, 10, (32,), generator=generator)
    dataset = torch.utils.data.TensorDataset(images, labels)
    sampler = None
    if xr.world_size() > 1:
        sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    train = torch.utils.data.DataLoader(
        dataset, flags["batch_size"], sampler=sampler, shuffle=sampler is None, drop_last=True
    )
    return train, torch.utils.data.DataLoader(dataset, flags["batch_size"])


def update(device, step, loss, tracker, epoch):
    test_utils.print_training_update(
        device, step, loss.item(), tracker.rate(), tracker.global_rate(), epoch
    )
    print(f"loss {loss.item():.9g}")


def train(rank, flags):
    torch.manual_seed(flags["seed"])
    train_loader, test_loader = loaders(flags)
    device = xm.xla_device()
    model = Digits().to(device)
    xm.broadcast_master_param(model)
    optimizer = optim.SGD(model.parameters(), lr=flags["lr"] * xr.world_size(), momentum=0.5)
    loss_fn = nn.NLLLoss()

    def train_epoch(loader, epoch):
        tracker = xm.RateTracker()
        model.train()
        for step, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_fn(model(data), target)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(flags["batch_size"])
            xm.add_step_closure(update, args=(device, step, loss, tracker, epoch))

    def accuracy_of(loader):
        model.eval()
        correct, total = 0, 0
        for data, target in loader:
            predicted = model(data).max(1, keepdim=True)[1]
            correct += predicted.eq(target.view_as(predicted)).sum()
            total += data.size()[0]
        return xm.mesh_reduce("accuracy", 100.0 * correct.item() / total, np.mean)

    for epoch in range(flags["epochs"]):
        train_epoch(pl.MpDeviceLoader(train_loader, device), epoch)
        accuracy = accuracy_of(pl.MpDeviceLoader(test_loader, device))
        xm.master_print(f"accuracy {accuracy:.3f}")
    xm.master_print(met.metrics_report())


if __name__ == "__main__":
    xmp.spawn(train, args=(FLAGS,), nprocs=1)
