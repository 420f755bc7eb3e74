"""One rank trains by DistributedDataParallel for some seconds and measures the same steps itself.

Arguments: the hook's socket, a file for the rendezvous, seconds. Prints what it measured as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from eagle_eye.agent.hook import attach

socket, rendezvous, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
torch.cuda.set_device(0)
torch.backends.cuda.matmul.allow_tf32 = True
dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).cuda()
parallel = DistributedDataParallel(model, device_ids=[0])
optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-4)
training = attach(parallel, optimizer, socket=socket)
new_event: Any = torch.cuda.Event
events = []
end_s = time.monotonic() + seconds
while time.monotonic() < end_s:
    x = torch.randn(8192, 4096, device="cuda")
    begin, end = (new_event(enable_timing=True) for _ in range(2))
    begin.record()
    loss = parallel(x).pow(2).mean()
    loss.backward()
    end.record()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("error")  # whatever in the hook waits for the GPU fails, and is counted
    training.step(loss=loss, tokens=8192)
    torch.cuda.set_sync_debug_mode("default")
    events.append((begin, end))
    if len(events) % 8 == 0:
        torch.cuda.synchronize()  # or the host runs many steps ahead
torch.cuda.synchronize()
compute_s = [begin.elapsed_time(end) / 1e3 for begin, end in events[len(events) // 4 :]]
reported = {"steps": len(events), "compute_s": statistics.median(compute_s), "failures": training.failures}
training.detach()
dist.destroy_process_group()
print(json.dumps(reported))
