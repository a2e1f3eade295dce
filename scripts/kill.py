"""Kill conversions at random moments: the target is absent or complete.

python -m scripts.kill [--moments 20] [--model PATH]
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx_mtp
from mlx_mtp.checkpoint.load import DEMO


def start_conversion(source: Path, target: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlx_mtp.convert", "--hf-path", str(source), "--mlx-path", str(target), "-q"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        tic = time.perf_counter()
        start_conversion(args.model, Path(folder) / "undisturbed").wait()
        took = time.perf_counter() - tic
        print(f"undisturbed: {took:.2f} s")
        for i in range(args.moments):
            target = Path(folder) / f"out-{i}"
            process = start_conversion(args.model, target)
            time.sleep(moment := random.uniform(0.3, 1.1) * took)
            how = random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            process.send_signal(how)
            process.wait()
            outcome = "absent"
            if target.exists():
                mlx_mtp.load(str(target))  # reads every tensor
                outcome = "complete"
            parts = len(list(Path(folder).glob(f".{target.name}.*")))
            print(f"{how.name} after {moment:.2f} s: {outcome}" + (", a temporary folder is left" if parts else ""))


if __name__ == "__main__":
    main()
