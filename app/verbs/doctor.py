"""`regard doctor`: what is installed and what this machine can do."""

import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_NEEDED = (
    "torch", "numpy", "pillow", "lightning", "torchmetrics", "tokenizers", "safetensors", "huggingface_hub",
    "jsonargparse", "rich", "matplotlib", "tensorboardX",
)  # fmt: skip
_EXTRAS = {
    "demo": ("easy-vqa",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "test": ("pytest", "pytest-timeout", "easy-vqa"),
    "lint": ("ruff", "mypy"),
}


@dataclass(frozen=True)
class Diagnosis:
    """Versions, devices and extras; a version of None means not installed."""

    regard: str
    python: str
    platform: str
    packages: dict[str, str | None]
    extras: dict[str, dict[str, str | None]]
    devices: list[str]
    threads: int
    precision: str

    @property
    def missing(self) -> list[str]:
        """Required packages that are not installed."""
        return [name for name, found in self.packages.items() if found is None]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "missing": self.missing}

    def __str__(self) -> str:
        lines = [f"regard {self.regard}, Python {self.python}, {self.platform}"]
        lines += [f"  {name:<16} {found or 'MISSING'}" for name, found in self.packages.items()]
        lines.append(f"devices: {', '.join(self.devices)}; {self.threads} CPU threads; trains in {self.precision}")
        for extra, packages in self.extras.items():
            absent = [name for name, found in packages.items() if found is None]
            state = "present" if not absent else f'lacks {", ".join(absent)}: pip install "regard[{extra}]"'
            lines.append(f"extra {extra:<6} {state}")
        if self.missing:
            lines.append(f"required but missing: {', '.join(self.missing)}; reinstall with pip install regard")
        return "\n".join(lines)


def doctor() -> Diagnosis:
    """Report versions, devices, and which extras are present."""
    import torch

    gpus = [
        f"cuda:{i} {torch.cuda.get_device_name(i)} ({torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB)"
        for i in range(torch.cuda.device_count())
    ]
    bf16 = bool(gpus) and torch.cuda.is_bf16_supported(including_emulation=False)
    return Diagnosis(
        regard=version("regard"),
        python=sys.version.split()[0],
        platform=platform.platform(),
        packages={name: _version(name) for name in _NEEDED},
        extras={extra: {name: _version(name) for name in names} for extra, names in _EXTRAS.items()},
        devices=[*gpus, f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"],
        threads=torch.get_num_threads(),
        precision="bf16-mixed" if bf16 else "32-true",
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
