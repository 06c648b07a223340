"""Lightning's Trainer, as its page on clusters calls it: devices of a node, number of nodes."""

import os

import lightning as L
import planted
import torch


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, x: torch.Tensor, step: int) -> torch.Tensor:
        planted.check(step)
        return ((self.layer(x) - x.sum(1, keepdim=True)) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["NNODES"]),
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
print(f"trained {trainer.global_step} steps on {trainer.world_size} ranks", flush=True)
