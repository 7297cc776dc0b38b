"""W1 for one epoch as one would write it down: what `run.py --start_up` compares the template with."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from works import build

images, targets = load_digits(return_X_y=True)
images, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(targets)
train_loader = DataLoader(TensorDataset(images[:1217], targets[:1217]), 64, shuffle=True, drop_last=True)
model = build("W1")
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for batch, labels in train_loader:
    loss = F.cross_entropy(model(batch), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    accuracy = (model(images[1217:1417]).argmax(1) == targets[1217:1417]).float().mean().item()
print(f"loss {loss.item():.4f} accuracy {accuracy:.3f}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "raw.pt")
