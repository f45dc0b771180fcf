import os  # new

import torch
import torch.distributed as dist  # new
from torch.nn.parallel import DistributedDataParallel as DDP  # new
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

gpu = torch.cuda.is_available()
device = f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu"  # was "cuda"
if gpu:  # new
    torch.cuda.set_device(device)  # new
dist.init_process_group("nccl" if gpu else "gloo")  # new

torch.manual_seed(0)
inputs = torch.randn(1024, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # new
loader = DataLoader(data, 64 // dist.get_world_size(), sampler=sampler)  # was 64, shuffle=True
model = torch.nn.Linear(16, 1).to(device)
ddp = DDP(model, device_ids=[device] if gpu else None)  # new
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for epoch in range(3):
    sampler.set_epoch(epoch)  # new
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(ddp(x.to(device)), y.to(device))  # was model(…)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if dist.get_rank() == 0:  # new
    print(f"last loss of rank 0: {loss.item():.4f}")
    torch.save(model.state_dict(), "model.pt")
del ddp  # new: it must not outlive the group
dist.destroy_process_group()  # new
