"""Averages stages of the training: python -m scripts.demo.average OUT FILE=WEIGHT ...

Stages of one training path lie close enough for their mean to be a model; it evens out what each has unlearned.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file, save_file


def main() -> None:
    out, *parts = sys.argv[1:]
    shares = {Path(file): float(weight) for file, _, weight in (part.rpartition("=") for part in parts)}
    total = sum(shares.values())
    stages = [(load_file(file), weight / total) for file, weight in shares.items()]
    mean = {name: sum(stage[name].float() * weight for stage, weight in stages) for name in stages[0][0]}
    save_file(mean, out, {"format": "pt"})


if __name__ == "__main__":
    main()
