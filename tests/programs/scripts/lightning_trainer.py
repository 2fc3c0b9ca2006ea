"""A Trainer of Lightning on as many CPU processes as the job has."""

import os

import lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


processes = int(os.environ.get("WORLD_SIZE", "1"))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=processes,
    strategy="ddp" if processes > 1 else "auto",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4))
print("processes:", trainer.world_size)
