"""A training of one process with Accelerate, as its quick tour has it."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for step, batch in enumerate(data, 1):
    loss = model(batch).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"Processed {step}/{len(data)} items, loss: {loss.item():.4f}")
print("processes:", accelerator.num_processes)
