"""A Lightning training script. RunCallback reports, saves at a stop, and passes on checkpoints.

    trnslurm submit ./train.py --nodes 2 -- --nodes {nodes} --devices {workers_per_node} \
      --out {checkpoints} --resume {resume}

The script also runs without the callback and its import, but `trnslurm status` then shows no steps.
"""

import argparse

import lightning as L  # noqa: N812  as its users do
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from trnslurm.train.lightning import RunCallback


class Regression(L.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def training_step(self, batch, index):
        rows, targets = batch
        loss = torch.nn.functional.mse_loss(self.model(rows), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        rows, targets = batch
        loss = torch.nn.functional.mse_loss(self.model(rows), targets)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Resumable(DataLoader):
    """Continues in the middle of an epoch, as torchdata's StatefulDataLoader does."""

    done = skip = 0

    def __iter__(self):
        skip, self.skip = self.skip, 0
        for number, batch in enumerate(super().__iter__(), 1):
            if number > skip:
                self.done = number
                yield batch

    def state_dict(self) -> dict:
        return {"done": self.done}

    def load_state_dict(self, state: dict) -> None:
        self.skip = state["done"] % len(self)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4, help="batch size per worker")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume")
    options = parser.parse_args()
    L.seed_everything(1, verbose=False)
    rows = torch.randn(64, 8)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    trainer = L.Trainer(
        num_nodes=options.nodes, devices=options.devices, min_epochs=1, max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate, log_every_n_steps=2, logger=False,
        callbacks=[RunCallback(), ModelCheckpoint(dirpath=options.out, save_last=True)],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=options.out,
    )  # fmt: skip
    trainer.fit(
        Regression(options.lr), Resumable(data, options.batch_size), DataLoader(data, 64),
        ckpt_path=options.resume,
    )  # fmt: skip


if __name__ == "__main__":
    main()
