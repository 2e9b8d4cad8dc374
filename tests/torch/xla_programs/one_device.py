"""An MLP on one device, with marked steps, and a checkpoint that training goes on from."""

import sys

import torch
import torch.nn as nn
import torch_xla.core.xla_model as xm

path = sys.argv[1]
device = xm.xla_device()
torch.manual_seed(5)


def make():
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 2))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def run(model, optimizer, scheduler, steps):
    loss_fn = nn.MSELoss().to(device)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        data = torch.randn(10, 6, generator=generator).to(device)
        target = torch.stack([data.sum(1), data[:, 0] * 2], dim=1)
        optimizer.zero_grad()
        loss = loss_fn(model(data), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        xm.mark_step()
        print(f"loss {loss.item():.9g}")


model, optimizer, scheduler = make()
run(model, optimizer, scheduler, 4)
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
xm.save({**state, "scheduler": scheduler.state_dict()}, path)

saved = torch.load(path, map_location="cpu")
assert all(value.device.type == "cpu" for value in saved["model"].values())
model, optimizer, scheduler = make()
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
scheduler.load_state_dict(saved["scheduler"])
run(model, optimizer, scheduler, 3)
with torch.no_grad():
    print(f"loss {model.eval()(torch.ones(1, 6, device=device)).sum().item():.9g}")
