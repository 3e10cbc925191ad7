"""Run the C++ kernels compiled for a processor that this machine is not: in Bochs, a PC in software, under Linux.

Each target is one static program, kernels and checks in it, which a kernel of Linux starts as its first process. What
it prints comes over the serial port.

    python tests/cpu_isa/run.py --kernel vmlinuz avx512-vnni
    python tests/cpu_isa/run.py native emulated-vnni        # on this processor: no emulator
"""

import argparse
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu import compiler

HERE = Path(__file__).resolve().parent
ISOLINUX = ("/usr/lib/ISOLINUX/isolinux.bin", "/usr/lib/syslinux/modules/bios/ldlinux.c32")
BIOS = ("/usr/share/bochs/BIOS-bochs-latest", "/usr/share/bochs/VGABIOS-lgpl-latest")
# Bochs 2.7 counts the state of protection keys (515, 516) and compacted states (321, 323) wrongly, and stops in one of
# the features that the others turn off.
KERNEL_ARGUMENTS = (
    "console=ttyS0,115200 quiet panic=1 mitigations=off clearcpuid=321,323,514,515,516,580 nopku nopcid nosmap nosmep "
    "nofsgsbase noinvpcid no5lvl idle=poll tsc=unstable random.trust_cpu=on OMP_WAIT_POLICY=passive"
)


@dataclass(frozen=True)
class Target:
    """What is compiled for, and the processor of Bochs that has it; none: this machine's own."""

    flags: tuple[str, ...]
    cpu: str | None


TARGETS = {
    "avx512-vnni": Target(("-march=icelake-server",), "corei7_icelake_u"),
    "avx512": Target(("-march=skylake-avx512",), "corei7_skylake_x"),
    "avx-vnni": Target(("-march=alderlake",), "arrow_lake"),  # Bochs 3.0
    "native": Target((), None),
    "emulated-vnni": Target(("-DOCTAVO_EMULATE_VNNI",), None),
}


CHECKS = ("formats", "linear", "attention", "decoder")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: the first two")
    parser.add_argument("--bochs", default="bochs", help="another Bochs than the one in PATH")
    parser.add_argument("--display", default="term", help="Bochs' display library: term or nogui")
    parser.add_argument("--kernel", type=Path, default=Path("build/cpu-isa/vmlinuz"), help="a vmlinuz for x86-64")
    parser.add_argument("--folder", type=Path, default=Path("build/cpu-isa"), help="for what is built")
    parser.add_argument("--checks", default=",".join(CHECKS), help="some of %(default)s")
    parser.add_argument("--timeout-s", type=float, default=3600, help="of one target")
    options = parser.parse_args()
    names = options.targets or ["avx512-vnni", "avx512"]
    unknown = set(names) - set(TARGETS)
    if not set(options.checks.split(",")) <= set(CHECKS):
        parser.error(f"--checks takes some of {', '.join(CHECKS)}, with commas")
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    missing = what_is_missing(options) if any(TARGETS[name].cpu for name in names) else []
    if missing:
        parser.error("these are missing: " + "; ".join(missing) + f" (see {HERE / 'README.md'})")
    options.bochs = os.path.abspath(shutil.which(options.bochs) or options.bochs)  # it runs in another folder
    return max(run_target(name, options) for name in names)


def what_is_missing(options: argparse.Namespace) -> list[str]:
    """Of what emulation needs."""
    programs = [name for name in (options.bochs, "xorriso") if not shutil.which(name)]
    files = [str(path) for path in (*map(Path, (*ISOLINUX, *BIOS)), options.kernel) if not path.is_file()]
    return programs + files


def run_target(name: str, options: argparse.Namespace) -> int:
    """0: every check held."""
    folder = (options.folder / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    target = TARGETS[name]
    program = compile_checks(folder, target)
    began = time.monotonic()
    print(f"== {name}", flush=True)
    lines = emulated(program, target.cpu, folder, options) if target.cpu else native(program, options.checks)
    last = ""
    with (folder / "results").open("w") as results:
        for line in lines:
            results.write(line + "\n")
            if not line.startswith(("ok ", "[")):  # the latter: of the kernel
                print(line, flush=True)
            last = line
    print(f"== {name}: {time.monotonic() - began:.0f} s; all lines are in {results.name}", flush=True)
    return 0 if last.endswith(" passed, 0 failed") else 1


def compile_checks(folder: Path, target: Target) -> Path:
    """The program. The reference is compiled for the oldest processor, and rounds after each operation."""
    march = "-march=native"
    flags = [flag for flag in compiler.FLAGS if flag not in ("-shared", "-fPIC", march)]
    if not any(flag.startswith("-march") for flag in target.flags):
        flags.append(march)
    command = [compiler.find_compiler(), "-std=c++17", "-static"]
    reference, program = folder / "reference.o", folder / "checks"
    oldest = ["-O1", "-march=x86-64", "-ffp-contract=off", "-c", str(HERE / "reference.cpp"), "-o", str(reference)]
    subprocess.run([*command, *oldest], check=True)
    paths = sorted((*compiler.SOURCES.glob("*.cpp"), *HERE.glob("*.cpp")))
    sources = [str(path) for path in paths if path.stem != "reference"]
    subprocess.run(
        [*command, *flags, *target.flags, f"-I{compiler.SOURCES}", *sources, str(reference), "-o", str(program)],
        check=True,
    )
    return program


def native(program: Path, checks: str) -> Iterator[str]:
    """Lines that it prints."""
    environment = {**os.environ, "CHECKS": checks}
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False, env=environment)
    yield from done.stdout.splitlines()


# ------------------------------------------------------------------------------------------------------------- emulated


def emulated(program: Path, cpu: str, folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Lines that it prints in a machine with this processor. Raises TimeoutError."""
    disc, serial = folder / "boot.iso", folder / "serial"
    write_disc(program, options.kernel, f"{KERNEL_ARGUMENTS} CHECKS={options.checks}", folder / "disc", disc)
    serial.unlink(missing_ok=True)
    (folder / "bochsrc").write_text(configuration(cpu, disc, serial, options.display))
    (folder / "commands").write_text("continue\n")  # Debian's Bochs has its debugger in it, which waits for one
    command = ["nice", "-n", "19", options.bochs, "-q", "-f", "bochsrc"]
    usage = subprocess.run([options.bochs, "--help"], capture_output=True, text=True, check=False)
    if "-rc filename" in usage.stdout + usage.stderr:
        command += ["-rc", "commands"]
    terminal, inner = pty.openpty()
    with (folder / "bochs.log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=log, cwd=folder, env={**os.environ, "TERM": "xterm"}
        )
    os.close(inner)
    try:
        yield from serial_lines(serial, process, terminal, time.monotonic() + options.timeout_s)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def serial_lines(serial: Path, process: subprocess.Popen[bytes], terminal: int, until: float) -> Iterator[str]:
    """Whole lines of the port, as they come, up to the count at the end or the end of Bochs."""
    read = 0
    while True:
        ended = process.poll() is not None
        drain(terminal)
        text = serial.read_text(errors="replace") if serial.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        for line in lines[read:]:
            yield line.rstrip()
            if line.rstrip().endswith(" failed"):
                return
        read = len(lines)
        if ended:
            yield f"Bochs ended, exit code {process.returncode}, before the checks did; see bochs.log and machine.log"
            return
        if time.monotonic() > until:
            raise TimeoutError(f"{serial.parent.name}: not done in time; raise --timeout-s")


def drain(terminal: int) -> None:
    """Bochs draws its screen there; nobody looks, but a full terminal would stop it. Waits up to a second."""
    until = time.monotonic() + 1
    while (left := until - time.monotonic()) > 0 and select.select([terminal], [], [], left)[0]:
        try:
            os.read(terminal, 65536)
        except OSError:  # its other end is closed
            time.sleep(max(0.0, until - time.monotonic()))


def configuration(cpu: str, disc: Path, serial: Path, display: str) -> str:
    """A PC with one such processor, a disc and a serial port. 20 million instructions are a second to it."""
    bios, video_bios = BIOS
    return "\n".join(
        (
            "megs: 512",
            f"cpu: model={cpu}, count=1, ips=20000000, reset_on_triple_fault=0",
            f"romimage: file={bios}",
            f"vgaromimage: file={video_bios}",
            f"ata0-master: type=cdrom, path={disc}, status=inserted",
            "boot: cdrom",
            f"com1: enabled=1, mode=file, dev={serial}",
            "clock: sync=none",
            f"display_library: {display}",
            "log: machine.log",
            "panic: action=fatal",
            "error: action=report",
            "info: action=ignore",
            "debug: action=ignore",
            "",
        )
    )


def write_disc(program: Path, kernel: Path, arguments: str, folder: Path, disc: Path) -> None:
    """A disc that starts the kernel, with the program as its first process."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "isolinux").mkdir(parents=True)
    for path in ISOLINUX:
        shutil.copy(path, folder / "isolinux")
    shutil.copy(kernel, folder / "vmlinuz")
    (folder / "initrd").write_bytes(archive(program.read_bytes()))
    (folder / "isolinux/isolinux.cfg").write_text(
        f"default checks\nprompt 0\nlabel checks\n kernel /vmlinuz\n append initrd=/initrd {arguments}\n"
    )
    boot = "-b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table"
    command = ["xorriso", "-as", "mkisofs", "-quiet", "-o", str(disc), *boot.split(), str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def archive(init: bytes) -> bytes:
    """A cpio archive in the kernel's "newc" form (Documentation/driver-api/early-userspace/buffer-format.rst)."""
    directory, file, console = 0o040755, 0o100755, 0o020600
    entries = [("dev", directory, b"", (0, 0)), ("dev/console", console, b"", (5, 1)), ("init", file, init, (0, 0))]
    made = b""
    for number, (name, mode, data, device) in enumerate([*entries, ("TRAILER!!!", 0, b"", (0, 0))], start=1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        made += b"070701" + "".join(f"{field:08X}" for field in fields).encode()
        made = aligned(made + name.encode() + b"\0")
        made = aligned(made + data)
    return made


def aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else Bochs would go on alone
    sys.exit(main())
