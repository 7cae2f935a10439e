"""Makes one step of Atropos's own example trainer (`example_trainer` in atroposlib) on a batch of this policy, and checks its loss.

It registers with the API server, takes a batch and trains on it with that package's functions, in PyTorch. The batch must have been
sampled with the weights of --checkpoint: by `policy.py --steps 0`, which serves and does not train. Then the trainer finds the
log-probabilities that came with the batch. Prints what the trainer measured; the exit status is 1 if the two do not agree. Needs
Debian's python3-torch, python3-pydantic and python3-tenacity.
"""

import argparse
import contextlib
import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

HEADS, LAYERS = 4, 2
# How much a log-probability of PyTorch may differ from one of JAX.
TOLERANCE = 1e-3


class Policy(torch.nn.Module):
    """The model of model.py."""

    def __init__(self, checkpoint):
        super().__init__()
        with np.load(checkpoint) as file:
            leaves = [file[name] for name in file.files]
        # As jax.tree.leaves has them: the means of Adam, the parameters, the squares, and two counters. Keys are in alphabetical order.
        many = (len(leaves) - 2) // 3
        self.leaves = torch.nn.ParameterList(torch.nn.Parameter(torch.tensor(leaf)) for leaf in leaves[many : 2 * many])

    def forward(self, tokens):
        *layers, out, places, embedding = self.leaves
        length = tokens.shape[1]
        # The trainer pads to 64 tokens. There are no places for those, and they are masked.
        x = embedding[tokens] + places[torch.arange(length).clamp(max=len(places) - 1)]
        past = torch.ones(length, length, dtype=torch.bool).tril()
        for layer in range(LAYERS):
            down, mix, qkv, up = layers[4 * layer : 4 * layer + 4]
            q, k, v = (part.view(*part.shape[:2], HEADS, -1) for part in (norm(x) @ qkv).chunk(3, -1))
            weights = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
            weights = weights.masked_fill(~past, -1e9).softmax(-1)
            x = x + torch.einsum("bhij,bjhd->bihd", weights, v).reshape(x.shape) @ mix
            x = x + F.gelu(norm(x) @ up, approximate="tanh") @ down
        return SimpleNamespace(logits=norm(x) @ out)


def norm(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def trainer_modules(environment):
    """The modules of the example trainer. Its `__init__` would also import transformers and vLLM, which a step does not need."""
    package = sys.modules["example_trainer"] = ModuleType("example_trainer")
    package.__path__ = [str(path) for path in environment.glob("lib/python*/site-packages/example_trainer")]
    # Imported, and not called unless use_wandb is set.
    sys.modules["wandb"] = ModuleType("wandb")
    return [importlib.import_module(f"example_trainer.{name}") for name in ["config", "api", "data", "training"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atroposlib", type=Path, required=True, metavar="DIR", help="the virtual environment in which it is installed")
    parser.add_argument("--atropos-url", default="http://127.0.0.1:8000", help="the Atropos API server")
    parser.add_argument("--checkpoint", default="policy.npz", help="the weights that the policy serves")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in each half of a batch")
    flags = parser.parse_args()
    # The trainer reports on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        measured = step(flags)
    measured["agrees"] = agrees(measured)
    print(json.dumps(measured), flush=True)
    sys.exit(0 if measured["agrees"] else 1)


def step(flags):
    config, api, data, training = trainer_modules(flags.atroposlib)
    settings = config.TrainingConfig(
        model_name="policy_lm", atropos_url=flags.atropos_url, batch_size=flags.batch_size, gradient_accumulation_steps=2, device="cpu",
    )
    model = Policy(flags.checkpoint)
    api.register_trainer(settings)
    batches, _ = data.get_data(settings.batch_size, settings.seq_len, settings.atropos_url)
    tokens, labels, advantages, temperatures, logprobs = batches[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    metrics = training.run_training_step(
        model, optimizer, tokens, labels, advantages, temperatures, settings, 0, inference_logprob_batches=logprobs
    )
    return {
        "sequences": sum(len(rows) for rows in tokens),
        "learned_tokens": sum(int((rows != -100).sum()) for rows in labels),
        **{name: metrics[name] for name in ["loss", "grad_norm", "mean_ratio", "clipped_fraction"]},
        **{name: training._logprob_alignment_stats[f"alignment/{name}"] for name in ["diff_abs_mean", "diff_max"]},
    }


def agrees(measured):
    return (
        measured["learned_tokens"] > 0
        and measured["diff_max"] < TOLERANCE
        and abs(measured["mean_ratio"] - 1) < TOLERANCE
        and measured["clipped_fraction"] == 0
        and math.isfinite(measured["loss"])
        and measured["grad_norm"] > 0
    )


if __name__ == "__main__":
    main()
