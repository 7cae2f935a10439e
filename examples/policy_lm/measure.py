"""Prints the share of right programs by level, of combinations that are asked for and of those held out, by the truth."""

import argparse
import json

import jax

from model import answers, restore
from tasks import FOLDS, combinations, is_right, program_text, prompt_of


def pass_rates(params, draws=4):
    rates = {}
    for name, held_out in [("asked", False), ("held_out", True)]:
        tasks = combinations(held_out) * draws
        drawn = answers(params, [prompt_of(parts) for parts in tasks], jax.random.key(3))
        by_level = {}
        for parts, (tokens, _) in zip(tasks, drawn):
            by_level.setdefault(FOLDS[parts[2]]["level"], []).append(is_right(program_text(tokens), parts))
        rates[name] = {f"level {level}": round(sum(right) / len(right), 3) for level, right in sorted(by_level.items())}
        every = sum(by_level.values(), [])
        rates[name]["all"] = round(sum(every) / len(every), 3)
    return rates


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="policy.npz")
    flags = parser.parse_args()
    state = restore(flags.checkpoint, 1)
    print(json.dumps({"step": int(state["step"]), **pass_rates(state["params"])}))
