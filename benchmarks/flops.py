"""What ViTs cost, by our formula, by torch's counter on our model and on timm's, and as timm publishes it.

    python benchmarks/flops.py [--json]

No weight is filled and nothing is computed: the counter sees shapes alone.
"""

import argparse
import json
from typing import Any

import torch
from peers import peer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.vit import ViT
from regard.vit.config import preset_config
from regard.vit.flops import distill_flops, forward_macs, training_flops

PUBLISHED = {"tiny": 1.26, "small": 4.61, "base": 17.58, "large": 61.60}  # GMACs at 224, timm's benchmark tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = [row(name) for name in PUBLISHED]
    if flags.json:
        print(json.dumps(rows))
        return
    print(f"{'ViT /16 at 224':16}" + "".join(f"{key:>22}" for key in rows[0] if key != "model"))
    for line in rows:
        print(f"{line['model']:16}" + "".join(f"{line[key]:>22}" for key in line if key != "model"))


def row(name: str) -> dict[str, Any]:
    config = preset_config(name, patch_size=16, image_size=(224, 224), classes=1000)
    timm = peer("timm")
    with torch.device("meta"):
        ours = counted(ViT(config).classify)
        theirs = counted(timm.create_model(f"vit_{name}_patch16_224", pretrained=False)) if timm else None
    return {
        "model": name,
        "formula GMACs": round(forward_macs(config) / 1e9, 3),
        "counted, ours": round(ours / 2e9, 3),
        "counted, timm": round(theirs / 2e9, 3) if theirs else "timm is not here",
        "timm publishes": PUBLISHED[name],
        "training GFLOPs": round(training_flops(config) / 1e9, 1),
        "DINO 2+8 GFLOPs": round(distill_flops(config) / 1e9, 1),
    }


def counted(run: Any) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        run(torch.randn(1, 3, 224, 224))
    return counter.get_total_flops()


if __name__ == "__main__":
    main()
